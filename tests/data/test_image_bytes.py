from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from leaktight.core.errors import DataError
from leaktight.data.images import (
    convert_channels,
    decode_image,
    fit_image,
    from_array,
    resize_images,
    stack_images,
    stretch_image,
)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def halves(width: int, height: int) -> Image.Image:
    """Black on the left, white on the right."""
    pixels = np.zeros((height, width), dtype=np.uint8)
    pixels[:, width // 2 :] = 255
    return Image.fromarray(pixels)


def test_decode_makes_grey_images_colour() -> None:
    image = decode_image(encoded(Image.new("L", (3, 2), 7)), "a.png")
    assert image.mode == "RGB"
    assert image.getpixel((0, 0)) == (7, 7, 7)


def test_decode_makes_colour_images_grey() -> None:
    assert decode_image(encoded(Image.new("RGB", (3, 2), (255, 0, 0))), "a.png", 1).getpixel((0, 0)) == 76


@pytest.mark.parametrize("data", [b"", b"not an image", encoded(halves(64, 64), "JPEG")[:200]])
def test_decode_names_what_it_cannot_read(data: bytes) -> None:
    with pytest.raises(DataError, match=r"pack\.zip/cat\.jpg: expected a readable image"):
        decode_image(data, "pack.zip/cat.jpg")


@pytest.mark.parametrize("limit", [50, 99])  # more than twice the limit is PIL's error, more than the limit its warning
def test_decode_refuses_bombs(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("L", (12, 10)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match=f"bomb.png: expected an image of at most {limit} pixels"):
        decode_image(data, "bomb.png")


def test_decode_refuses_16_bits() -> None:
    data = encoded(Image.fromarray(np.full((2, 2), 60000, dtype=np.uint16)))
    with pytest.raises(DataError, match="expected 8 bits per channel"):
        decode_image(data, "deep.png")


def test_fit_cuts_the_centre() -> None:
    wide = fit_image(halves(40, 10), 10, 10)
    assert wide.shape == (1, 10, 10)
    assert wide[0, :, :5].eq(0).all()
    assert wide[0, :, 5:].eq(255).all()


def test_stretch_keeps_the_whole() -> None:
    assert stretch_image(halves(40, 10).convert("RGB"), 32, 100).shape == (3, 32, 100)
    row = stretch_image(halves(40, 10), 10, 10)[0, 0].tolist()
    assert row[:4] == [0] * 4
    assert row[6:] == [255] * 4


def test_resize_is_exact_for_constants_and_keeps_the_range() -> None:
    images = torch.cat([torch.full((1, 1, 8, 8), 200), torch.eye(8).mul(255).view(1, 1, 8, 8)]).to(torch.uint8)
    resized = resize_images(images, 32)
    assert resized.shape == (2, 1, 32, 32)
    assert resized.dtype == torch.uint8
    assert resized[0].eq(200).all()
    assert resized[1, 0, 0, 31] == 0
    assert resized[1, 0].diagonal().min() > 150


def test_resize_cuts_square_first() -> None:
    images = torch.zeros(1, 1, 6, 4, dtype=torch.uint8)
    images[:, :, 1:5] = 90
    assert resize_images(images, 8).eq(90).all()


def test_resize_may_keep() -> None:
    images = torch.zeros(1, 1, 6, 4, dtype=torch.uint8)
    assert resize_images(images, None) is images


def test_channels_go_both_ways() -> None:
    grey = torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2)
    colour = convert_channels(grey, 3)
    assert colour.shape == (1, 3, 2, 2)
    assert torch.equal(convert_channels(colour, 1), grey)
    assert convert_channels(grey, None) is grey


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 8, 9), (5, 1, 8, 9)),
        ((5, 8, 9, 3), (5, 3, 8, 9)),
        ((5, 8, 9, 1), (5, 1, 8, 9)),
        ((5, 3, 8, 9), (5, 3, 8, 9)),
    ],
)
def test_arrays_of_every_layout(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert from_array(np.zeros(shape, dtype=np.uint8), "x").shape == expected


def test_channel_order_survives() -> None:
    pixels = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    pixels[0, 1, 0] = (1, 2, 3)
    assert from_array(pixels, "x")[0, :, 1, 0].tolist() == [1, 2, 3]


def test_float_arrays() -> None:
    assert from_array(np.array([[[0.0, 0.5, 1.0]]]), "x").flatten().tolist() == [0, 128, 255]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 4, 4, 5), dtype=np.uint8), "1 or 3 channels, got 5"),
        (np.zeros((4, 4), dtype=np.uint8), "not supported yet: tables .*4 x 4"),
        (np.zeros((2, 4, 4), dtype=np.int32), "got int32"),
        (np.full((2, 4, 4), 255.0), r"in \[0, 1\], got 255"),
        (np.full((2, 4, 4), np.nan), r"in \[0, 1\], got nan"),
    ],
)
def test_strange_arrays_are_refused(array: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_array(array, "x")


def test_memory_is_bounded_before_reading() -> None:
    def load(name: str) -> torch.Tensor:
        pytest.fail("read a file")

    with pytest.raises(
        DataError, match=r"at most 0\.001 GB in memory, got 1000 that need 0\.00307 GB; set max_classes"
    ):
        stack_images([str(number) for number in range(1000)], load, (3, 32, 32), 0.001, "set")
