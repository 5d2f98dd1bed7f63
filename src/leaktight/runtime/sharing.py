"""Values sent between the main process and its workers: pickled by value, large shared ones in shared memory.

What would not fit in memory is kept in files (`in_file`). Where shared memory is too small (64 MB of /dev/shm in many
containers), so is what is shared. Files have no name, so that nothing is left of them whatever happens.

Only processes of one run read these bytes; messages between server and remote clients are those of `fl.messages`.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from leaktight.core.errors import MachineError
from leaktight.core.faults import remedy
from leaktight.core.types import Examples, Params

if TYPE_CHECKING:
    from typing_extensions import Buffer


_LARGE = 1 << 24  # bytes of a ciphertext that is not copied
_ALIGNED = 64  # bytes; the widest registers read from multiples of it
_FOR_LOCKS = 1 << 20
"""Bytes of shared memory that data leave free."""


def dumped(value: object, shared: Sequence[object] = ()) -> bytes:
    """A value as bytes. shared: objects that the other side already has; they are replaced by their index."""
    return _Pickler(list(shared)).dumped(value)


def loaded(data: Buffer, shared: Sequence[object] = ()) -> Any:
    """The inverse of `dumped`. Only for bytes from a process of the same run."""
    return _Unpickler(data, shared).load()


def without_examples(value: object) -> tuple[bytes, list[Shared]]:
    """A value as bytes, and separately the `Examples` in it, which processes can share."""
    pickler = _Pickler([], Examples)
    return pickler.dumped(value), [_apart(each) for each in pickler.shared]


def in_shared_memory(value: object) -> Shared:
    """A value for other processes, with one copy of it and none of its ciphertexts."""
    size = _Size()
    _Apart(size).dump(value)
    data = torch.empty(size.total, dtype=torch.uint8)
    pickler = _Apart(_Memory(data.numpy().data))
    pickler.dump(value)
    return Shared(_shared(data), [_shared(each) for each in pickler.shared if isinstance(each, Tensor)])


@dataclass(frozen=True)
class Shared:
    """A value for other processes: its tensors, which are not copied, and the rest as bytes."""

    data: bytes | Tensor | InFile
    tensors: Sequence[Tensor | InFile]

    def value(self) -> Any:
        """The value; only in another process, which receives tensors in place of files."""
        assert not isinstance(self.data, InFile)
        return loaded(self.data.numpy().data if isinstance(self.data, Tensor) else self.data, self.tensors)


class InFile:
    """A tensor in a file without a name. Another process receives it as a tensor, which is read where it is needed."""

    def __init__(self, tensor: Tensor) -> None:
        data = _bytes(tensor)
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        try:
            self.file = _written([data])
        except OSError as error:
            raise MachineError(
                f"cannot share {len(data):,} bytes with worker processes: shared memory is too small, and so is "
                f"{tempfile.gettempdir()} ({error.strerror}); {remedy(error)} (TMPDIR), or use --workers 0"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (reduction.DupFd(self.file.fileno()), self.dtype, self.shape)


def in_file(tensors: Params) -> dict[str, Tensor]:
    """These tensors in a file without a name. They are read where they are needed, and the system may forget them in
    between, so that they take no memory that anything else needs."""
    parts = [_bytes(tensor) for tensor in tensors.values()]
    gaps = [bytes(-len(part) % _ALIGNED) for part in parts]
    try:
        with _written([piece for pair in zip(parts, gaps, strict=True) for piece in pair]) as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if file.tell() else bytearray()
    except OSError as error:
        total = sum(map(len, parts))
        raise MachineError(
            f"cannot keep {total:,} bytes of an update in {tempfile.gettempdir()} ({error.strerror}); {remedy(error)} "
            "(TMPDIR), or draw fewer clients in each round (federation.per_round)"
        ) from error
    found, start = {}, 0
    for (name, tensor), part, gap in zip(tensors.items(), parts, gaps, strict=True):
        if len(part):
            flat = torch.frombuffer(view, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            found[name] = flat.reshape(tensor.shape)
        else:
            found[name] = tensor
        start += len(part) + len(gap)
    return found


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _written(parts: Iterable[Buffer]) -> IO[bytes]:
    """A file without a name that holds these bytes; it is gone when it is closed."""
    file = tempfile.TemporaryFile(prefix="leaktight-")  # noqa: SIM115 (the caller closes it)
    try:
        file.writelines(parts)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def _mapped(handle: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    descriptor = handle.detach()
    try:
        view = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return torch.frombuffer(view, dtype=dtype).reshape(shape)


def _shared(tensor: Tensor) -> Tensor | InFile:
    """The tensor, moved to shared memory, or in a file if that is too small."""
    if not _room(tensor.nbytes):
        return InFile(tensor)
    try:
        moved: Tensor = tensor.share_memory_()
    except RuntimeError:
        return InFile(tensor)
    return moved


def _room(size: int) -> bool:
    """Whether shared memory has room for so many bytes beside the locks of processes, as far as that is known."""
    try:
        state = os.statvfs("/dev/shm")
    except (OSError, AttributeError):  # another system
        return True
    return state.f_bavail * state.f_frsize >= size + _FOR_LOCKS


def _apart(value: object) -> Shared:
    pickler = _Pickler([], Tensor)
    data = pickler.dumped(value)
    return Shared(data, [_shared(each) for each in pickler.shared if isinstance(each, Tensor)])


class _Pickler(pickle.Pickler):
    """Pickles plain tensors by value; the default would store all memory that a view is part of.

    shared: objects that are left out; those of the type `also` are added to it.
    """

    def __init__(self, shared: list[object], also: type | tuple[()] = (), to: _Size | _Memory | None = None) -> None:
        self.data, self.shared, self.also = io.BytesIO(), shared, also
        self.numbers = {id(each): number for number, each in enumerate(shared)}
        super().__init__(self.data if to is None else to, pickle.HIGHEST_PROTOCOL)

    def dumped(self, value: object) -> bytes:
        self.dump(value)
        return self.data.getvalue()

    def persistent_id(self, obj: object) -> int | None:
        if isinstance(obj, self.also) and id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.shared)
            self.shared.append(obj)
        return self.numbers.get(id(obj))

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is not Tensor or obj.requires_grad or not obj.is_cpu:
            return NotImplemented
        if obj.layout != torch.strided or not obj.is_contiguous():
            return NotImplemented
        return _tensor, (
            pickle.PickleBuffer(obj.reshape(-1).view(torch.uint8).numpy().data),
            obj.dtype,
            tuple(obj.shape),
        )


class _Apart(_Pickler):
    """Leaves out ciphertexts: large tensors of bytes, which nobody changes."""

    def __init__(self, to: _Size | _Memory) -> None:
        super().__init__([], Tensor, to)

    def persistent_id(self, obj: object) -> int | None:
        large = isinstance(obj, Tensor) and obj.dtype == torch.uint8 and obj.dim() == 1 and len(obj) >= _LARGE
        return super().persistent_id(obj) if large else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: Buffer, shared: Sequence[object]) -> None:
        super().__init__(io.BufferedReader(_Memory(memoryview(data))))
        self.shared = shared

    def persistent_load(self, number: int) -> object:
        return self.shared[number]


class _Size:
    """Counts what is written to it."""

    total = 0

    def write(self, data: Buffer) -> None:
        self.total += memoryview(data).nbytes


class _Memory(io.RawIOBase):
    """Memory as a file: what is read or written is not copied in between."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.place = view, 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Buffer, /) -> int:
        target = memoryview(into)
        part = self.view[self.place : self.place + len(target)]
        target[: len(part)] = part
        self.place += len(part)
        return len(part)

    def write(self, data: Buffer, /) -> int:
        source = memoryview(data).cast("B")
        self.view[self.place : self.place + len(source)] = source
        self.place += len(source)
        return len(source)


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor in the memory of `data`: an update may have gigabytes, which are copied as seldom as possible."""
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
