"""Images as bytes (N, C, H, W): decoding, resizing, channels. Every data set uses these functions."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.reading import size_words
from leaktight.core.scope import channels_words, outside_inputs
from leaktight.core.text import printable, sides

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".webp"})
_MODES = {1: "L", 3: "RGB"}
_CHUNK = 1024
_CHUNK_PIXELS = 2**26
MOST_BYTES = 8 * 10**9
"""The most bytes of images in memory."""
_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "WEBP")
"""What the suffixes promise: PIL would also start programs, such as Ghostscript, for others."""
MOST_IMAGE = 256 * 2**20
"""The most bytes of an image file."""
_LUMA = (0.299, 0.587, 0.114)


def is_image(name: str) -> bool:
    return Path(name).suffix.lower() in IMAGE_SUFFIXES


def decode_image(data: bytes, source: str, channels: int = 3) -> Image.Image:
    """Decode an image file as grey (1 channel) or RGB (3). source: its name in errors.

    An image with more pixels than PIL's limit is an error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                if image.mode.startswith(("I", "F")):
                    raise DataError(f"{source}: expected 8 bits per channel, got mode {image.mode}; convert the image")
                return image.convert(_MODES[channels])
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(
            f"{source}: expected an image of at most {Image.MAX_IMAGE_PIXELS} pixels, got more; remove it or scale it"
        ) from None
    except (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, RuntimeError, ArithmeticError) as error:
        # PIL raises any of these for a damaged file.
        raise DataError(
            f"{source}: expected a readable image, got {len(data)} bytes ({printable(_shown(error))}); replace it"
        ) from None


def _shown(error: Exception) -> str:
    return "no such kind of picture" if isinstance(error, UnidentifiedImageError) else str(error)


def to_tensor(image: Image.Image) -> Tensor:
    """An image as bytes (C, H, W)."""
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def fit_image(image: Image.Image, height: int, width: int) -> Tensor:
    """The image, cropped at the centre to the proportions, then scaled to (C, height, width)."""
    return to_tensor(ImageOps.fit(image, (width, height), method=Image.Resampling.BICUBIC))


def stretch_image(image: Image.Image, height: int, width: int) -> Tensor:
    """The whole image, stretched to (C, height, width)."""
    return to_tensor(image.resize((width, height), Image.Resampling.BICUBIC))


def stack_images(
    names: Sequence[str], load: Callable[[str], Tensor], shape: tuple[int, int, int], max_gigabytes: float, source: str
) -> Tensor:
    """All images (N, *shape), loaded one at a time; an error if they need more than `max_gigabytes`."""
    needed = len(names) * shape[0] * shape[1] * shape[2] / 1e9
    if needed > max_gigabytes:
        raise DataError(
            f"{source}: expected images of at most {max_gigabytes:g} GB in memory, got {len(names)} that need "
            f"{needed:.3g} GB; set max_classes, max_per_class or a smaller size, or raise max_gigabytes"
        )
    images = torch.empty((len(names), *shape), dtype=torch.uint8)
    for place, name in enumerate(names):
        images[place] = load(name)
    return images


def check_memory(count: int, shape: tuple[int, int, int]) -> None:
    """Raise DataError if so many images of this shape take too much memory."""
    if (needed := count * math.prod(shape)) > MOST_BYTES:
        raise DataError(
            f"expected images of at most {size_words(MOST_BYTES)} in memory, got {count} of {sides(shape)} that need "
            f"{size_words(needed)}; set a smaller size"
        )


def resize_images(images: Tensor, size: int | None) -> Tensor:
    """Centre-crop to a square and scale to `size` pixels per side; None keeps the images."""
    if size is None or images.shape[-2:] == (size, size):
        return images
    check_memory(len(images), (images.shape[1], size, size))
    height, width = images.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = images[..., top : top + side, left : left + side]
    return torch.cat([_scaled(chunk, size) for chunk in square.split(max(1, min(_CHUNK, _CHUNK_PIXELS // size**2)))])


def _scaled(images: Tensor, size: int) -> Tensor:
    scaled = F.interpolate(images.float(), size=(size, size), mode="bicubic", antialias=True, align_corners=False)
    return scaled.round_().clamp_(0, 255).to(torch.uint8)


def convert_channels(images: Tensor, channels: int | None) -> Tensor:
    """Grey to colour or colour to grey (luminance of ITU-R 601); None keeps the images."""
    if channels is None or images.shape[1] == channels:
        return images
    if channels == 3:
        return images.expand(-1, 3, -1, -1).contiguous()
    weights = torch.tensor(_LUMA).view(1, 3, 1, 1)
    return torch.cat([_grey(chunk, weights) for chunk in images.split(_CHUNK)])


def _grey(images: Tensor, weights: Tensor) -> Tensor:
    return (images.float() * weights).sum(1, keepdim=True).round_().clamp_(0, 255).to(torch.uint8)


def check_images(shape: tuple[int, ...], dtype: np.dtype, source: str) -> None:
    """Raise DataError for an array that `from_array` does not take."""
    if (outside := outside_inputs(shape, dtype.kind)) is not None:
        raise DataError(f"{source}: {outside}")
    if dtype.kind != "f" and dtype != np.uint8:
        raise DataError(f"{source}: expected images of bytes or of floats in [0, 1], got {dtype}; convert them")
    if 0 in shape:
        raise DataError(f"{source}: expected images, got none (shape {sides(shape)}); save the right array")
    if len(shape) == 4 and shape[-1] not in _MODES and shape[1] not in _MODES:
        channels = shape[1] if shape[2] == shape[3] else shape[3] if shape[1] == shape[2] else min(shape[1], shape[3])
        raise DataError(f"{source}: expected images of {channels_words(channels)}")


def from_array(array: np.ndarray, source: str) -> Tensor:
    """(N, C, H, W) bytes from (N, H, W), (N, H, W, C) or (N, C, H, W), of bytes or of floats in [0, 1]."""
    check_images(array.shape, array.dtype, source)
    if array.dtype.kind == "f":
        if array.size and not (float(array.min()) >= 0 and float(array.max()) <= 1):
            raise DataError(
                f"{source}: expected float images in [0, 1], got {array.min():g}..{array.max():g}; rescale them"
            )
        floats, array = array, np.empty(array.shape, np.uint8)
        for start in range(0, len(floats), _CHUNK):
            array[start : start + _CHUNK] = np.rint(floats[start : start + _CHUNK] * 255)
    images = torch.from_numpy(np.ascontiguousarray(array))
    if images.ndim == 3:
        return images[:, None]
    return images.permute(0, 3, 1, 2).contiguous() if images.shape[-1] in _MODES else images
