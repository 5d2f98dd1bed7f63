"""Values sent between the main process and its workers: pickled by value, large shared ones in shared memory.

Only processes of one run read these bytes; messages between server and remote clients are those of `fl.messages`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leaktight.core.types import Examples

if TYPE_CHECKING:
    from typing_extensions import Buffer


_LARGE = 1 << 24  # bytes of a ciphertext that is not copied


def dumped(value: object, shared: Sequence[object] = ()) -> bytes:
    """A value as bytes. shared: objects that the other side already has; they are replaced by their index."""
    return _Pickler(list(shared)).dumped(value)


def loaded(data: Buffer, shared: Sequence[object] = ()) -> Any:
    """The inverse of `dumped`. Only for bytes from a process of the same run."""
    return _Unpickler(data, shared).load()


def without_examples(value: object) -> tuple[bytes, list[object]]:
    """A value as bytes, and separately the `Examples` in it, which processes can share."""
    pickler = _Pickler([], Examples)
    return pickler.dumped(value), pickler.shared


@dataclass(frozen=True)
class InMemory:
    """A value in shared memory: its bytes, and the ciphertexts in it, which are not copied."""

    data: Tensor
    ciphertexts: list[object]

    def value(self) -> Any:
        """The value, in another process."""
        return loaded(self.data.numpy().data, self.ciphertexts)


def in_shared_memory(value: object) -> InMemory:
    """A value for other processes, with one copy of it and none of its ciphertexts."""
    size = _Size()
    _Apart(size).dump(value)
    data = torch.empty(size.total, dtype=torch.uint8)
    pickler = _Apart(_Memory(data.numpy().data))
    pickler.dump(value)
    return InMemory(data.share_memory_(), [each.share_memory_() for each in pickler.shared if isinstance(each, Tensor)])


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
