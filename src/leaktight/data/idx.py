"""MNIST, Fashion-MNIST and EMNIST: IDX files, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import os
import string
import struct
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

import numpy as np
import torch
from torch import Tensor

from leaktight.core.errors import DataError, suggestion
from leaktight.core.reading import most_unpacked, opened, size_words
from leaktight.core.text import sides
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.files import MAX_MEMBER_BYTES, first_existing, missing
from leaktight.data.settings import Part, PartSettings

_UNSIGNED_BYTES = 8
_DIGITS = tuple(string.digits)
_MERGED = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")
_EMNIST_CLASSES = {
    "balanced": _MERGED,
    "byclass": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "bymerge": _MERGED,
    "digits": _DIGITS,
    "letters": tuple(string.ascii_uppercase),
    "mnist": _DIGITS,
}
_FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


def read_idx(path: Path, num_dims: int) -> Tensor:
    """The content of an IDX file of unsigned bytes with `num_dims` dimensions, plain or gzipped (.gz)."""
    try:
        with opened(path, MAX_MEMBER_BYTES, DataError) as stored, _unpacked(stored, path) as file:
            magic = file.read(4)
            expected = bytes((0, 0, _UNSIGNED_BYTES, num_dims))
            if magic != expected:
                raise DataError(
                    f"{path}: expected an IDX file of bytes with {num_dims} dimensions (magic {expected.hex()}), "
                    f"got magic {magic.hex() or 'nothing'}; fetch it again"
                )
            head = file.read(4 * num_dims)
            if len(head) != 4 * num_dims:
                raise DataError(f"{path}: expected {num_dims} sizes after the magic, got the end of the file")
            dims = struct.unpack(f">{num_dims}I", head)
            length = math.prod(dims)
            most = most_unpacked(os.fstat(stored.fileno()).st_size)
            if length > most:
                allowed = f"at most {size_words(most)} in a file of its size"
                raise DataError(f"{path}: expected {allowed}, got sizes {sides(dims)}; fetch it again")
            data = file.read(length + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected an undamaged file, got {error or 'a read error'}; fetch it again") from None
    if len(data) != length:
        got = f"only {len(data)}" if len(data) < length else "more"
        raise DataError(f"{path}: expected {length} bytes of data for sizes {sides(dims)}, got {got}; fetch it again")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(dims).copy())


def _unpacked(stored: IO[bytes], path: Path) -> AbstractContextManager[IO[bytes]]:
    return cast("IO[bytes]", gzip.GzipFile(fileobj=stored)) if path.suffix == ".gz" else nullcontext(stored)


def _find(name: str, folders: Sequence[Path], files: Sequence[str]) -> Path:
    found = first_existing([folder / f"{file}{end}" for folder in folders for file in files for end in ("", ".gz")])
    if found is None:
        raise missing(name, [folders[0], folders[-1]], f"{files[0]}.gz")
    return found


def _read_part(name: str, folders: Sequence[Path], stem: str, *, first_label: int = 0) -> Examples:
    # Some mirrors write a dot where the original has a dash.
    images_path = _find(name, folders, (f"{stem}-images-idx3-ubyte", f"{stem}-images.idx3-ubyte"))
    labels_path = _find(name, folders, (f"{stem}-labels-idx1-ubyte", f"{stem}-labels.idx1-ubyte"))
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: expected {len(images)} labels, one for each image of {images_path.name}, got {len(labels)}"
        )
    return Examples(images[:, None], labels.long() - first_label)


_MNIST_STEMS: dict[Part, str] = {"train": "train", "test": "t10k"}


def _folders(root: Path, *names: str) -> list[Path]:
    """The folders where a data set may be: its own, and the one that torchvision uses."""
    plain, vision = names
    inside = ("", "raw", f"{vision}/raw", "gzip")
    return [root / plain / folder for folder in inside] + [root / vision / "raw"]


@dataclass(frozen=True, kw_only=True)
class Mnist(PartSettings):
    """MNIST: 70 000 handwritten digits, 28x28 grey, 10 classes."""

    def load(self, root: Path) -> Dataset:
        folders = _folders(root, "mnist", "MNIST")
        return self.from_parts("mnist", lambda part: _read_part("mnist", folders, _MNIST_STEMS[part]), _DIGITS)


@dataclass(frozen=True, kw_only=True)
class FashionMnist(PartSettings):
    """Fashion-MNIST: 70 000 articles of clothing, 28x28 grey, 10 classes."""

    def load(self, root: Path) -> Dataset:
        folders = _folders(root, "fashion_mnist", "FashionMNIST")
        return self.from_parts(
            "fashion_mnist", lambda part: _read_part("fashion_mnist", folders, _MNIST_STEMS[part]), _FASHION_CLASSES
        )


@dataclass(frozen=True, kw_only=True)
class Emnist(PartSettings):
    """EMNIST: handwritten letters and digits, 28x28 grey, 10 to 62 classes by `split`.

    split: one of the six published selections.
    """

    split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = "balanced"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in _EMNIST_CLASSES:
            raise ValueError(
                f"expected a split of EMNIST, got {self.split!r}; {suggestion(self.split, _EMNIST_CLASSES)}"
            )

    def load(self, root: Path) -> Dataset:
        return self.from_parts(f"emnist_{self.split}", lambda part: self._read(root, part), _EMNIST_CLASSES[self.split])

    def _read(self, root: Path, part: Part) -> Examples:
        first = 1 if self.split == "letters" else 0
        stem = f"emnist-{self.split}-{part}"
        examples = _read_part("emnist", _folders(root, "emnist", "EMNIST"), stem, first_label=first)
        # The files store each image column by column.
        return Examples(examples.inputs.transpose(2, 3).contiguous(), examples.targets)
