"""Data sets that come with the installed packages: nothing is downloaded."""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.rng import Rng
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.images import check_memory, decode_image, from_array, resize_images, stretch_image
from leaktight.data.settings import SplitSettings, check_minimum

PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
}
_MARGINS = {"retina": 0.13}  # share cut off at each edge: that photograph is round, on black
_TILE = 1.5  # side of a test tile, in crops: room for several test crops, little lost for training
_STEPS = 16  # crops start on a grid of 1/16 of their side


def _package_file(package: str, name: str) -> bytes:
    """A file inside an installed package, read from its place: the packages' own loaders may go to the network."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise DataError(f"expected the package {package} to be installed, it is not; install leaktight again")
    path = Path(spec.origin).parent / name
    if not path.is_file():
        raise DataError(f"expected {path} in the package {package}, found nothing; install {package} again")
    return path.read_bytes()


@dataclass(frozen=True, kw_only=True)
class Digits(SplitSettings):
    """Scikit-learn's 1797 handwritten digits, 8x8 scaled up to 32x32 grey, 10 classes; nothing to download.

    size: pixels per side.
    """

    size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, 8, "size")

    def load(self, root: Path) -> Dataset:
        # Read as scikit-learn reads it, whose own loader takes longer to import than PyTorch's half.
        lines = gzip.decompress(_package_file("sklearn", "datasets/data/digits.csv.gz")).decode().splitlines()
        table = np.loadtxt(lines, delimiter=",")  # 64 pixels from 0 to 16, and the digit
        images = resize_images(from_array(table[:, :-1].reshape(-1, 8, 8) / 16, "digits"), self.size)
        examples = Examples(images, torch.from_numpy(table[:, -1].astype(np.int64)))
        return Dataset("digits", *self.divide(examples), tuple("0123456789"))


@dataclass(frozen=True, kw_only=True)
class Faces(SplitSettings):
    """100 faces of LFW and 100 patches without a face from scikit-image, 25x25 scaled to 32x32 grey, 2 classes.

    size: pixels per side.
    """

    size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, 8, "size")

    def load(self, root: Path) -> Dataset:
        array = np.load(io.BytesIO(_package_file("skimage", "data/lfw_subset.npy")), allow_pickle=False)
        images = resize_images(from_array(array, "faces"), self.size)
        targets = torch.arange(len(images)).div(100, rounding_mode="floor")
        return Dataset("faces", *self.divide(Examples(images, targets)), ("face", "other"))


class Window(NamedTuple):
    """Where a crop was cut: a square of `side` pixels of the photograph with that label."""

    label: int
    top: int
    left: int
    side: int


@dataclass(frozen=True, kw_only=True)
class Photos:
    """Colour crops of 10 photographs that come with scikit-image and scikit-learn, 32x32, one class per photograph.

    Training and test crops are cut from areas that share no pixel: about a fifth of each photograph, in scattered
    tiles, is for testing alone. Crops of the same part may overlap.
    split_seed: draws the tiles and the crops. size: of a crop after scaling.
    crop: its side before, as a share of the photograph's shorter side.
    train_per_class, test_per_class: how many crops of each photograph.
    min_contrast: the least standard deviation of a crop's luminance, in [0, 1]; flat areas are left out.
    """

    size: int = 32
    crop: float = 0.16
    train_per_class: int = 200
    test_per_class: int = 40
    min_contrast: float = 0.05
    split_seed: int = 0

    def __post_init__(self) -> None:
        check_minimum(self, 1, "train_per_class", "test_per_class")
        check_minimum(self, 8, "size")
        if not 0.05 <= self.crop <= 0.3:
            raise ValueError(
                f"expected crop in [0.05, 0.3] of the shorter side, got {self.crop}; 0.16 shows whole parts"
            )
        if not 0 <= self.min_contrast < 0.5:
            raise ValueError(f"expected min_contrast in [0, 0.5), got {self.min_contrast}; 0.05 leaves out flat areas")

    def load(self, root: Path) -> Dataset:
        check_memory(len(PHOTOGRAPHS) * (self.train_per_class + self.test_per_class), (3, self.size, self.size))
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        labels: tuple[list[int], list[int]] = ([], [])
        for label, name in enumerate(PHOTOGRAPHS):
            photograph = load_photograph(name)
            for place, windows in enumerate(self.windows(photograph, label)):
                parts[place].extend(self._cut(photograph, window) for window in windows)
                labels[place].extend(window.label for window in windows)
        train, test = (Examples(torch.stack(parts[i]), torch.tensor(labels[i])) for i in (0, 1))
        return Dataset("photos", train, test, tuple(PHOTOGRAPHS))

    def windows(self, photograph: Image.Image, label: int) -> tuple[list[Window], list[Window]]:
        """Where the training and the test crops of a photograph lie."""
        side = round(self.crop * min(photograph.size))
        luminance = np.asarray(photograph.convert("L"), dtype=np.float64) / 255
        mean, square = (_window_means(values, side) for values in (luminance, luminance**2))
        contrast = np.sqrt(np.maximum(square - mean**2, 0))
        tested = _window_means(_test_area(luminance.shape, side).astype(np.float64), side)
        grid = np.zeros(contrast.shape, dtype=bool)
        step = max(side // _STEPS, 1)
        grid[::step, ::step] = True
        usable = grid & (contrast >= self.min_contrast)
        rng = Rng(self.split_seed).child("photos", label)
        train = self._choose(usable & (tested < 1e-9), self.train_per_class, label, side, rng.child("train"))
        test = self._choose(usable & (tested > 1 - 1e-9), self.test_per_class, label, side, rng.child("test"))
        return train, test

    def _choose(self, usable: np.ndarray, count: int, label: int, side: int, rng: Rng) -> list[Window]:
        places = np.argwhere(usable)
        if len(places) < count:
            name = list(PHOTOGRAPHS)[label]
            raise DataError(
                f"photos: expected {count} crops of {name!r} with enough contrast, got {len(places)}; "
                "lower min_contrast, train_per_class or test_per_class"
            )
        chosen = rng.public_numpy().choice(len(places), size=count, replace=False)
        return [Window(label, int(top), int(left), side) for top, left in places[chosen]]

    def _cut(self, photograph: Image.Image, window: Window) -> Tensor:
        box = (window.left, window.top, window.left + window.side, window.top + window.side)
        # Cut first, scale after: scaling looks at no pixel outside the crop.
        return stretch_image(photograph.crop(box), self.size, self.size)


def load_photograph(name: str) -> Image.Image:
    package, file = PHOTOGRAPHS[name]
    image = decode_image(_package_file(package, file), file)
    margin = round(_MARGINS.get(name, 0.0) * min(image.size))
    return image.crop((margin, margin, image.width - margin, image.height - margin))


def _test_area(shape: tuple[int, ...], side: int) -> np.ndarray:
    """Which pixels are for testing: every fifth tile, a knight's move apart, so that no two touch along a side."""
    tile = int(_TILE * side)
    rows, columns = np.arange(shape[0]) // tile, np.arange(shape[1]) // tile
    area: np.ndarray = (rows[:, None] + 2 * columns[None, :]) % 5 == 1
    return area


def _window_means(values: np.ndarray, side: int) -> np.ndarray:
    """The mean of every square of `side` pixels, by its top left corner, from sums over rows and columns."""
    total = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    sums = total[side:, side:] - total[:-side, side:] - total[side:, :-side] + total[:-side, :-side]
    means: np.ndarray = sums / side**2
    return means
