"""Data sets in one .npz file of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.scope import outside_file, outside_targets
from leaktight.core.tensor_files import ERRORS, Head
from leaktight.core.tensor_files import read_npz as read_arrays
from leaktight.core.text import sides
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.files import user_path
from leaktight.data.images import check_images, convert_channels, from_array, resize_images
from leaktight.data.settings import SplitSettings, check_channels, check_minimum

MOST_CLASSES = 100_000


def read_npz(
    path: Path, keys: Sequence[str], *, images: str = "", labels: str = "", groups: str | None = None
) -> dict[str, np.ndarray]:
    """The named arrays of an .npz file. Arrays of objects are refused, because they are pickles.

    images, labels, groups: the keys of images, of their classes and of their groups, whose kinds and shapes are checked
    before the first array is read.
    """

    def check(heads: Mapping[str, Head]) -> None:
        if images:
            check_images(heads[images].shape, heads[images].dtype, f"{path} [{images}]")
        count = heads[images].shape[0] if images else 0
        if labels and (outside := outside_targets(heads[labels].shape, heads[labels].dtype.kind, count)):
            raise DataError(f"{path}: {outside}")
        for key in (*([labels] if labels else []), *([groups] if groups else [])):
            _check_integers(heads[key], path, key, count)

    if path.is_dir():
        raise DataError(f"{path}: expected an .npz file, got a folder; for images in it set data.kind=image_folder")
    if path.suffix.lower() == ".npy":
        raise DataError(f"{path}: expected an .npz file, got one array; save np.savez(path, images=..., labels=...)")
    try:
        return read_arrays(path, keys, check=check, kinds="biufSU")
    except KeyError as error:
        raise DataError(
            f"{path}: {error.args[0]}; name the arrays, such as data.images_key=x and data.labels_key=y"
        ) from None
    except ERRORS as error:
        if (outside := outside_file(path.name)) is not None:
            raise DataError(f"{path}: {outside}") from None
        raise DataError(f"{path}: expected a readable .npz without objects, got {error}; save it again") from None


def _check_integers(head: Head, path: Path, key: str, count: int) -> None:
    if head.dtype.kind not in "iu" or head.shape != (count,):
        raise DataError(
            f"{path}: expected {key} to be {count} integers, one per image, got {sides(head.shape)} of {head.dtype}; "
            "name the right array"
        )


def _integers(array: np.ndarray, path: Path, key: str) -> Tensor:
    if len(array) and int(array.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{path}: expected {key} within 63 bits, got {array.max()}; correct them")
    return torch.from_numpy(array.astype(np.int64))


def _check_labels(targets: Tensor, path: Path, key: str, first: int) -> None:
    low, high = (int(targets.min()), int(targets.max())) if len(targets) else (0, 0)
    if low < 0 or high >= MOST_CLASSES or len(targets) < 2:
        got = f"{low + first} to {high + first}" if len(targets) > 1 else f"{len(targets)} of them"
        raise DataError(
            f"{path}: expected {key} of 2 or more images from {first} to {first + MOST_CLASSES - 1}, got {got}; "
            "set first_label, or number the classes from 0"
        )


@dataclass(frozen=True, kw_only=True)
class ArraySettings(SplitSettings):
    """A data set in an .npz file. size: pixels per side, or None to keep it. channels: 1, 3, or None to keep them."""

    size: int | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, 1, "size")
        check_channels(self.channels)

    def read_arrays(
        self, path: Path, images_key: str, labels_key: str, *, first_label: int = 0, group_key: str | None = None
    ) -> tuple[Examples, Tensor | None]:
        """The examples of a file and, if `group_key` is given, the group of each (N,)."""
        keys = [images_key, labels_key] + ([group_key] if group_key else [])
        arrays = read_npz(path, keys, images=images_key, labels=labels_key, groups=group_key)
        images = from_array(arrays[images_key], f"{path} [{images_key}]")
        images = resize_images(convert_channels(images, self.channels), self.size)
        targets = _integers(arrays[labels_key], path, labels_key) - first_label
        _check_labels(targets, path, labels_key, first_label)
        groups = _integers(arrays[group_key], path, group_key) if group_key else None
        return Examples(images, targets), groups

    def split_grouped(
        self, name: str, examples: Examples, groups: Tensor | None, class_names: tuple[str, ...], group_noun: str
    ) -> Dataset:
        """A training and a test part with the same proportions of classes and groups."""
        if groups is None:
            return Dataset(name, *self.divide(examples), class_names)
        members, groups = torch.unique(groups, return_inverse=True)
        train, test = self.cut(groups * (int(examples.targets.max()) + 1) + examples.targets)
        group_names = tuple(f"{group_noun} {member}" for member in members.tolist())
        return Dataset(
            name, examples.take(train), examples.take(test), class_names, groups=groups[train], group_names=group_names
        )


@dataclass(frozen=True, kw_only=True)
class Arrays(ArraySettings):
    """Your own images and labels in an .npz file.

    path: the file. images_key, labels_key: names of its arrays. test_images_key, test_labels_key: arrays of the test
    part; without them `test_share` of each class is used for testing. group_key: an array with the natural client of
    each training example. names_key: an array of class names; without it a class is named by its number.
    first_label: the number of the first class in the file.
    """

    path: str
    images_key: str = "images"
    labels_key: str = "labels"
    test_images_key: str | None = None
    test_labels_key: str | None = None
    group_key: str | None = None
    names_key: str | None = None
    first_label: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.test_images_key is None) != (self.test_labels_key is None):
            raise ValueError("expected test_images_key and test_labels_key together, got one; set both or neither")

    def load(self, root: Path) -> Dataset:
        path = user_path(self.path, root)
        examples, groups = self.read_arrays(
            path, self.images_key, self.labels_key, first_label=self.first_label, group_key=self.group_key
        )
        class_names = self._class_names(path, examples.targets)
        if self.test_images_key is None or self.test_labels_key is None:
            return self.split_grouped(path.stem, examples, groups, class_names, self.group_key or "")
        test, _ = self.read_arrays(path, self.test_images_key, self.test_labels_key, first_label=self.first_label)
        if groups is None:
            return Dataset(path.stem, examples, test, class_names)
        members, groups = torch.unique(groups, return_inverse=True)
        names = tuple(f"{self.group_key} {member}" for member in members.tolist())
        return Dataset(path.stem, examples, test, class_names, groups=groups, group_names=names)

    def _class_names(self, path: Path, targets: Tensor) -> tuple[str, ...]:
        if self.names_key is not None:
            return tuple(str(name) for name in read_npz(path, (self.names_key,))[self.names_key])
        highest = int(targets.max()) if len(targets) else 0
        return tuple(str(number + self.first_label) for number in range(highest + 1))


def _only_npz(root: Path, name: str) -> Path:
    folder = root / name
    found = sorted(folder.glob("*.npz"))
    if not found:
        raise DataError(f"{name}: expected an .npz file in {folder}, found nothing; put it there")
    if len(found) > 1:
        raise DataError(f"{folder}: expected one .npz, got {', '.join(path.name for path in found)}; keep one of them")
    return found[0]


@dataclass(frozen=True, kw_only=True)
class FemnistDigits(ArraySettings):
    """FEMNIST digits: handwriting with the writer as natural client, 28x28 grey (dark on white), 10 classes."""

    def load(self, root: Path) -> Dataset:
        path = _only_npz(root, "femnist_digits")
        examples, groups = self.read_arrays(path, "images", "labels", group_key="client")
        return self.split_grouped("femnist_digits", examples, groups, tuple("0123456789"), "writer")


@dataclass(frozen=True, kw_only=True)
class OrlFaces(ArraySettings):
    """ORL (AT&T) faces: 40 people, 10 grey portraits of each, cut square and scaled to `size`."""

    size: int | None = 64

    def load(self, root: Path) -> Dataset:
        path = _only_npz(root, "orl_faces")
        examples, _ = self.read_arrays(path, "images", "subject", first_label=1)
        class_names = tuple(f"s{number}" for number in range(1, 41))
        return Dataset("orl_faces", *self.divide(examples), class_names)
