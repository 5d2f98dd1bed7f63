"""CIFAR-10 and CIFAR-100: the python version, the binary version, and an .npz with images of one part."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy._core import multiarray
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.pickles import check_pickles
from leaktight.core.reading import MOST_TEXT, read_limited
from leaktight.core.text import described, printable
from leaktight.core.types import Examples
from leaktight.data.arrays import read_npz
from leaktight.data.dataset import Dataset
from leaktight.data.files import MAX_MEMBER_BYTES, MissingDataError, first_existing, incomplete, missing
from leaktight.data.images import from_array
from leaktight.data.settings import Part, PartSettings

_PIXELS = 3 * 32 * 32
_CIFAR10_FILES: Mapping[Part, Sequence[str]] = {
    "train": [f"data_batch_{number}" for number in range(1, 6)],
    "test": ["test_batch"],
}
_CIFAR100_FILES = {
    "cifar-100-python": ("train", "test", "meta"),
    "cifar-100-binary": ("train.bin", "test.bin", "fine_label_names.txt"),
}
_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_COARSE_CLASSES = (
    *("aquatic_mammals", "fish", "flowers", "food_containers", "fruit_and_vegetables"),
    *("household_electrical_devices", "household_furniture", "insects", "large_carnivores"),
    *("large_man-made_outdoor_things", "large_natural_outdoor_scenes", "large_omnivores_and_herbivores"),
    *("medium_mammals", "non-insect_invertebrates", "people", "reptiles", "small_mammals", "trees"),
    *("vehicles_1", "vehicles_2"),
)
_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


def _reconstructed(kind: type, shape: object, code: object) -> np.ndarray:
    """An empty array, which takes its shape with its content: a shape before any content could ask for all memory."""
    return np.ndarray((0,), np.int8)


# Only what is needed to rebuild an array: an unrestricted pickle can run any code.
_ADMITTED: Mapping[tuple[str, str], object] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    **{(module, "_reconstruct"): _reconstructed for module in _ARRAY_MODULES},
    **{(module, "scalar"): multiarray.scalar for module in _ARRAY_MODULES},
}
_PICKLE_ERRORS = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(ImportError, MemoryError, OverflowError, RuntimeError),
)


class _RefusedError(Exception):
    """A pickle that asks for more than plain values and arrays."""


class _ArrayUnpickler(pickle.Unpickler):
    """Plain containers, text, numbers and arrays; every other global is refused by name."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ADMITTED:
            asked = printable(f"{module}.{name}", 80)
            raise _RefusedError(f"expected a pickle of plain containers and arrays, got one that asks for {asked}")
        return _ADMITTED[module, name]


def read_pickle(path: Path) -> dict[str, object]:
    """A pickled dictionary of plain values and arrays, without running code from the file."""
    try:
        content = io.BytesIO(read_limited(path, MAX_MEMBER_BYTES, DataError))
        check_pickles(content, 1)
        content.seek(0)
        value = _ArrayUnpickler(content, encoding="latin1").load()
    except _RefusedError as error:
        raise DataError(f"{path}: {error}; do not trust this file") from None
    except (OSError, *_PICKLE_ERRORS) as error:
        raise DataError(
            f"{path}: expected an undamaged pickle, got {type(error).__name__}: {printable(error)}; fetch it again"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a pickled dictionary, got {type(value).__name__}; fetch it again")
    return {_text(key): item for key, item in value.items()}


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _from_pickle(path: Path, labels_key: str) -> Examples:
    batch = read_pickle(path)
    if "data" not in batch or labels_key not in batch:
        raise DataError(
            f"{path}: expected the keys data and {labels_key}, got {printable(', '.join(batch))}; fetch it again"
        )
    data, labels = batch["data"], batch[labels_key]
    if not isinstance(labels, list):
        raise DataError(f"{path}: expected a list of labels, got {type(labels).__name__}; fetch it again")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(labels), _PIXELS):
        got = described(data) if isinstance(data, np.ndarray) else type(data).__name__
        raise DataError(f"{path}: expected data {len(labels)} x {_PIXELS} of bytes, one row per label, got {got}")
    if not all(isinstance(label, int) and 0 <= label < 100 for label in labels):
        raise DataError(f"{path}: expected labels from 0 to 99, got others; fetch it again")
    return Examples(torch.from_numpy(data.copy()).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64))


def _from_binary(path: Path, num_labels: int, column: int) -> Examples:
    """Records of `num_labels` label bytes and 3072 pixel bytes; the label is the one in `column`."""
    data = np.frombuffer(read_limited(path, MAX_MEMBER_BYTES, DataError), dtype=np.uint8)
    record = num_labels + _PIXELS
    if not len(data) or len(data) % record:
        raise DataError(f"{path}: expected a multiple of {record} bytes, got {len(data)}; fetch it again")
    rows = torch.from_numpy(data.reshape(-1, record).copy())
    return Examples(rows[:, num_labels:].reshape(-1, 3, 32, 32), rows[:, column].long())


def _joined(parts: Sequence[Examples]) -> Examples:
    return Examples(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))


@dataclass(frozen=True, kw_only=True)
class Cifar10(PartSettings):
    """CIFAR-10: 60 000 photographs of animals and vehicles, 32x32 colour, 10 classes.

    Reads the training batches that are present; one of the five is enough, and the others are said to be missing.
    """

    def load(self, root: Path) -> Dataset:
        dataset = self.from_parts("cifar10", lambda part: self._read(root, part), _CIFAR10_CLASSES)
        return replace(dataset, note=self._note(root))

    def _read(self, root: Path, part: Part) -> Examples:
        names = _CIFAR10_FILES[part]
        for folder in self._folders(root, "cifar-10-batches-py"):
            if paths := [folder / name for name in names if (folder / name).exists()]:
                return _joined([_from_pickle(path, "labels") for path in paths])
        for folder in self._folders(root, "cifar-10-batches-bin"):
            if paths := [folder / f"{name}.bin" for name in names if (folder / f"{name}.bin").exists()]:
                return _joined([_from_binary(path, 1, 0) for path in paths])
        if (found := self._absent(root)) is not None:
            raise incomplete("cifar10", found[0], found[1], sum(map(len, _CIFAR10_FILES.values())))
        places = [root / "cifar-10-batches-py", root / "cifar-10-batches-bin"]
        raise missing("cifar10", places, f"{names[0]} or {names[0]}.bin")

    @staticmethod
    def _folders(root: Path, name: str) -> list[Path]:
        return [root / outer / name for outer in ("", "cifar10", "cifar-10")]

    def _absent(self, root: Path) -> tuple[Path, list[str]] | None:
        """The folder of the data set and the files that it lacks; None if there is no folder."""
        for name, suffix in (("cifar-10-batches-py", ""), ("cifar-10-batches-bin", ".bin")):
            for folder in self._folders(root, name):
                if folder.is_dir():
                    files = [f"{stem}{suffix}" for stems in _CIFAR10_FILES.values() for stem in stems]
                    return folder, [file for file in files if not (folder / file).exists()]
        return None

    def _note(self, root: Path) -> str:
        found = self._absent(root)
        lacking = [name for name in found[1] if name.startswith("data_")] if found and self.part != "test" else []
        if not lacking:
            return ""
        return f"{len(lacking)} of {len(_CIFAR10_FILES['train'])} training files are missing: {', '.join(lacking)}"


@dataclass(frozen=True, kw_only=True)
class Cifar100(PartSettings):
    """CIFAR-100: 60 000 photographs, 32x32 colour, 100 fine or 20 coarse classes.

    labels: "fine" or "coarse". Also reads .npz files with the arrays images, fine, coarse and fine_label_names and
    "train" or "test" in their name.
    """

    labels: Literal["fine", "coarse"] = "fine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels not in ("fine", "coarse"):
            raise ValueError(f"expected labels fine or coarse, got {self.labels!r}; set one of them")

    def load(self, root: Path) -> Dataset:
        names = _COARSE_CLASSES if self.labels == "coarse" else self._fine_names(root)
        return self.from_parts("cifar100", lambda part: self._read(root, part), names)

    def _read(self, root: Path, part: Part) -> Examples:
        if pickled := self._find(root, "cifar-100-python", part):
            return _from_pickle(pickled, f"{self.labels}_labels")
        if binary := self._find(root, "cifar-100-binary", f"{part}.bin"):
            return _from_binary(binary, 2, ("coarse", "fine").index(self.labels))
        if packed := self._npz(root, part):
            arrays = read_npz(packed, ("images", self.labels))
            targets: Tensor = torch.from_numpy(arrays[self.labels].astype(np.int64))
            return Examples(from_array(arrays["images"], str(packed)), targets)
        raise self._missing(root, f"{part}, {part}.bin or *{part}*.npz")

    def _missing(self, root: Path, expected: str) -> MissingDataError:
        for name, files in _CIFAR100_FILES.items():
            if (folder := self._find(root, name, ".")) is not None:
                return incomplete(
                    "cifar100", folder, [file for file in files if not (folder / file).exists()], len(files)
                )
        return missing("cifar100", self._places(root), expected)

    def _fine_names(self, root: Path) -> tuple[str, ...]:
        if meta := self._find(root, "cifar-100-python", "meta"):
            names = read_pickle(meta).get("fine_label_names")
            return tuple(_text(name) for name in names) if isinstance(names, list) else ()
        if listed := self._find(root, "cifar-100-binary", "fine_label_names.txt"):
            return tuple(read_limited(listed, MOST_TEXT, DataError).decode(errors="replace").split())
        for part in ("train", "test"):
            if packed := self._npz(root, part):
                return tuple(str(name) for name in read_npz(packed, ("fine_label_names",))["fine_label_names"])
        raise self._missing(root, "meta, fine_label_names.txt or an .npz with fine_label_names")

    @staticmethod
    def _find(root: Path, folder: str, file: str) -> Path | None:
        return first_existing([root / outer / folder / file for outer in ("", "cifar100", "cifar-100")])

    @staticmethod
    def _npz(root: Path, part: str) -> Path | None:
        return next(iter(sorted((root / "cifar100").glob(f"*{part}*.npz"))), None)

    @staticmethod
    def _places(root: Path) -> list[Path]:
        return [root / "cifar-100-python", root / "cifar-100-binary", root / "cifar100"]
