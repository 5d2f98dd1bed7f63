from __future__ import annotations

import itertools
import socket
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.data import embedded
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits, Faces, Photos, Window

NOWHERE = Path("/nowhere/at/all")


@pytest.fixture(scope="module")
def photos() -> Dataset:
    return Photos().load(NOWHERE)


def photograph(name: str) -> Image.Image:
    return embedded.load_photograph(name)


def test_digits() -> None:
    data = Digits().load(NOWHERE)
    assert data.inputs.shape == (1, 32, 32)
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.class_names == tuple("0123456789")
    counts = torch.bincount(data.test.targets, minlength=10)
    assert counts.min() >= 34
    assert data.train.inputs.min() == 0
    assert data.train.inputs.max() == 255


def test_digits_scaled_up_look_like_the_originals() -> None:
    large, small = Digits().load(NOWHERE).train, Digits(size=8).load(NOWHERE).train
    assert torch.equal(large.targets, small.targets)
    means = torch.nn.functional.avg_pool2d(large.inputs.float(), 4).flatten()
    assert torch.corrcoef(torch.stack([means, small.inputs.flatten().float()]))[0, 1] > 0.98


def test_digits_are_the_same_every_time() -> None:
    first, again, other = (Digits(split_seed=seed).load(NOWHERE) for seed in (0, 0, 1))
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert not torch.equal(first.test.targets, other.test.targets)


def test_no_digit_is_in_both_parts() -> None:
    data = Digits(size=8).load(NOWHERE)
    train = {image.numpy().tobytes() for image in data.train.inputs}
    assert not any(image.numpy().tobytes() in train for image in data.test.inputs)


def test_faces() -> None:
    data = Faces().load(NOWHERE)
    assert data.inputs.shape == (1, 32, 32)
    assert (len(data.train), len(data.test)) == (160, 40)
    assert data.class_names == ("face", "other")
    assert data.test.targets.sum() == 20


def windows(settings: Photos) -> list[tuple[list[Window], list[Window]]]:
    return [settings.windows(photograph(name), label) for label, name in enumerate(embedded.PHOTOGRAPHS)]


def overlap(first: Window, second: Window) -> bool:
    rows = first.top < second.top + second.side and second.top < first.top + first.side
    columns = first.left < second.left + second.side and second.left < first.left + first.side
    return rows and columns


@pytest.mark.parametrize("settings", [Photos(), Photos(crop=0.1, split_seed=3), Photos(crop=0.2, min_contrast=0.03)])
def test_training_and_test_crops_share_no_pixel(settings: Photos) -> None:
    for train, test in windows(settings):
        assert len(train) == 200
        assert len(test) == 40
        assert not any(overlap(one, other) for one, other in itertools.product(train, test))


def test_crops_lie_inside_and_are_distinct() -> None:
    for name, (train, test) in zip(embedded.PHOTOGRAPHS, windows(Photos()), strict=True):
        width, height = photograph(name).size
        assert len({*train, *test}) == 240
        for window in train + test:
            assert 0 <= window.top <= height - window.side
            assert 0 <= window.left <= width - window.side


def test_the_crops_loaded_are_those_recorded(photos: Dataset) -> None:
    for label, name in ((1, "cat"), (9, "tissue")):
        image = photograph(name)
        train, test = Photos().windows(image, label)
        for part, listed in ((photos.train, train), (photos.test, test)):
            stored = part.inputs[part.targets == label]
            window = listed[7]
            box = (window.left, window.top, window.left + window.side, window.top + window.side)
            mean = torch.tensor(image.crop(box).resize((1, 1), Image.Resampling.BOX).getpixel((0, 0)))
            assert (stored[7].float().mean((1, 2)) - mean).abs().max() < 3


def test_photos(photos: Dataset) -> None:
    assert photos.inputs.shape == (3, 32, 32)
    assert photos.num_classes == 10
    assert torch.bincount(photos.train.targets).tolist() == [200] * 10
    assert torch.bincount(photos.test.targets).tolist() == [40] * 10


def contrast(images: Tensor) -> Tensor:
    return images.float().div(255).mean(1).flatten(1).std(1)


def test_no_crop_is_nearly_constant(photos: Dataset) -> None:
    # Scaling down smooths, so a little less than the 0.05 before scaling.
    assert contrast(photos.train.inputs).min() > 0.02
    assert contrast(photos.test.inputs).min() > 0.02
    flat = Photos(min_contrast=0.0).load(NOWHERE)
    assert contrast(flat.train.inputs).min() < 0.02


def test_photos_are_the_same_every_time(photos: Dataset) -> None:
    assert torch.equal(Photos().load(NOWHERE).train.inputs, photos.train.inputs)
    assert not torch.equal(Photos(split_seed=1).load(NOWHERE).train.inputs, photos.train.inputs)


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    Digits().load(NOWHERE)
    Faces().load(NOWHERE)
    Photos(train_per_class=1, test_per_class=1).load(NOWHERE)


def test_too_many_crops() -> None:
    with pytest.raises(DataError, match="expected 5000 crops of 'astronaut' with enough contrast, got"):
        Photos(train_per_class=5000).load(NOWHERE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": 0.5}, "expected crop in"),
        ({"crop": 0.0}, "expected crop in"),
        ({"min_contrast": -0.1}, "expected min_contrast in"),
        ({"train_per_class": 0}, "expected train_per_class >= 1"),
        ({"size": 4}, "expected size >= 8"),
    ],
)
def test_photo_settings_are_checked(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Photos(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [Digits, Faces])
def test_sizes_are_checked(source: type[Digits | Faces]) -> None:
    with pytest.raises(ValueError, match="expected size >= 8, got 0"):
        source(size=0)


def test_a_package_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(embedded.PHOTOGRAPHS, "astronaut", ("skimage", "data/gone.png"))
    with pytest.raises(DataError, match=r"expected .*gone\.png in the package skimage"):
        Photos().load(NOWHERE)
