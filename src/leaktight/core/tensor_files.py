"""Reading tensors and arrays from files of others: no code in them runs, sizes are checked before memory is taken."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.pickles import check_pickles
from leaktight.core.reading import most_unpacked, open_zip, opened, size_words
from leaktight.core.text import LONGEST, printable

MOST_FILE = 16 * 10**9
"""The most bytes of a file of tensors."""
MOST_TENSORS = 20_000
_MOST_HEADER = 16 * 2**20
_MOST_LISTING = 8 * 2**20
_LEGACY_PICKLES = 5
_SCRIPT = re.compile(r"[^/]*/(constants\.pkl|code/.*)")
"""What only TorchScript puts into its archives."""
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_SAVE = "save tensors alone: torch.save(model.state_dict(), path), or safetensors"
_CHUNK = 2**20
_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
)
ERRORS = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(MemoryError, SafetensorError, zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, SyntaxError),
)
"""What libraries raise for damaged files; `pickle.UnpicklingError` is apart, because it may mean code."""


class NotTensorsError(UsageError):
    """A file of a model that is more than tensors."""


def read_torch(path: Path) -> object:
    """The content of a file of `torch.save`: tensors in plain containers; NotTensorsError for TorchScript.

    Raises pickle.UnpicklingError for anything else, and one of `ERRORS` for a damaged file.
    """
    with opened(path, MOST_FILE) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about some pickles before it refuses them
        if zipfile.is_zipfile(file):
            _check_torch_zip(file, path)
        else:
            file.seek(0)
            check_pickles(file, _LEGACY_PICKLES)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def refusal(path: Path, error: pickle.UnpicklingError) -> NotTensorsError:
    """The error for a pickle that PyTorch refuses to load as tensors alone."""
    found = _GLOBAL.search(str(error))
    what = f"names {found.group(1)}" if found else "holds other objects than tensors"
    return NotTensorsError(f"refused {path}: it is a pickle that {what}, and could run code when loaded; {_SAVE}")


def _check_torch_zip(file: IO[bytes], path: Path) -> None:
    with open_zip(file, path, _MOST_LISTING, UsageError) as archive:
        _check_total(sum(info.file_size for info in archive.infolist()), file)
        if any(_SCRIPT.fullmatch(info.filename) for info in archive.infolist()):
            raise NotTensorsError(f"refused {path}: it is a TorchScript program, which runs code when loaded; {_SAVE}")
        for info in archive.infolist():
            if info.filename.endswith(".pkl"):
                with archive.open(info) as content:
                    check_pickles(content, 1)


def _check_total(count: int, file: IO[bytes]) -> None:
    """Raise ValueError if the content of a file takes more memory than a file of its size may."""
    most = most_unpacked(os.fstat(file.fileno()).st_size)
    if count > most:
        raise ValueError(f"expected at most {size_words(most)} in a file of its size, got {size_words(count)}")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file by name. Raises one of `ERRORS` for a damaged file."""
    with opened(path, MOST_FILE) as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if length > _MOST_HEADER:
            raise ValueError(f"expected a header of at most {size_words(_MOST_HEADER)}, got {size_words(length)}")
        listed = json.loads(file.read(length) or b"null")
        if not isinstance(listed, dict):
            raise ValueError("expected a header that lists tensors, got none")
        _check_names(listed)
    return load_file(path)


def check_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError for tensors that are not plain numbers in memory, are too many, or together too large.

    The elements of a view or a sparse tensor may be many more than the file has bytes.
    """
    _check_names(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.is_quantized or tensor.device.type != "cpu":
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"expected floats of 16 to 64 bits or integers in {name!r}, got {kind} on {tensor.device}")
    with opened(path, MOST_FILE) as file:
        _check_total(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()), file)


def _check_names(names: Iterable[str]) -> None:
    """Raise ValueError for too many names, and for those that a terminal should not be shown."""
    listed = list(names)
    if len(listed) > MOST_TENSORS:
        raise ValueError(f"expected at most {MOST_TENSORS} tensors, got {len(listed)}")
    for name in listed:
        if len(name) > LONGEST or not name.isprintable():
            raise ValueError(f"expected printable names of at most {LONGEST} characters, got {printable(name, 40)!r}")


@dataclass(frozen=True)
class Head:
    """What an array says about itself before its content."""

    shape: tuple[int, ...]
    dtype: np.dtype
    columns_first: bool

    @property
    def size(self) -> int:
        """Its bytes in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_npz(
    path: Path,
    keys: Sequence[str] | None = None,
    *,
    check: Callable[[Mapping[str, Head]], None] | None = None,
    kinds: str = "biuf",
) -> dict[str, np.ndarray]:
    """Arrays of an .npz file by name, in the order of `keys`, or all.

    check: called with what the arrays say about themselves, before the first is read. kinds: of numpy's types.
    Raises KeyError with the names that are there for a missing key, and one of `ERRORS` for a damaged file.
    """
    with opened(path, MOST_FILE) as file, open_zip(file, path, _MOST_LISTING, UsageError) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        _check_names(members)
        chosen = list(members) if keys is None else list(keys)
        if absent := [key for key in chosen if key not in members]:
            raise KeyError(f"expected the array {absent[0]!r}, got {printable(', '.join(members)) or 'none'}")
        heads = {key: _head(archive, members[key], kinds) for key in chosen}
        _check_total(sum(head.size for head in heads.values()), file)
        if check is not None:
            check(heads)
        return {key: _content(archive, members[key], head) for key, head in heads.items()}


def _head(archive: zipfile.ZipFile, info: zipfile.ZipInfo, kinds: str) -> Head:
    with archive.open(info) as member:
        head = _read_head(member)
        place = member.tell()
    name = info.filename
    if head.dtype.hasobject:
        raise ValueError(f"expected numbers in {name!r}, got objects, which are pickles and could run code")
    if head.dtype.kind not in kinds or head.dtype.itemsize > LONGEST * 4:
        raise ValueError(f"expected numbers in {name!r}, got {printable(head.dtype, 60)}")
    if any(isinstance(side, bool) or side < 0 for side in head.shape) or len(head.shape) > 32:
        raise ValueError(f"expected sides of 0 or more in {name!r}, got {printable(head.shape, 60)}")
    if info.file_size != place + head.size:
        raise ValueError(f"expected {head.size} bytes of data for {name!r}, got {max(info.file_size - place, 0)}")
    return head


def _read_head(member: IO[bytes]) -> Head:
    version = np.lib.format.read_magic(member)
    reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if reader is None:
        raise ValueError(f"expected version 1 or 2 of the array format, got {version}")
    shape, columns_first, dtype = reader(member)
    return Head(shape, dtype, columns_first)


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, head: Head) -> np.ndarray:
    with archive.open(info) as member:
        _read_head(member)
        content = bytearray(head.size)
        view, place = memoryview(content), 0
        while chunk := member.read(_CHUNK):
            view[place : place + len(chunk)] = chunk
            place += len(chunk)
    if place != head.size:
        raise ValueError(f"expected {head.size} bytes of data in {info.filename!r}, got {place}")
    array = np.frombuffer(content, dtype=head.dtype)
    return array.reshape(head.shape, order="F" if head.columns_first else "C")
