"""Values sent between the main process and its workers: pickled by value, large shared ones in shared memory.

Only processes of one run read these bytes; messages between server and remote clients are those of `fl.messages`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leaktight.core.types import Examples


def dumped(value: object, shared: Sequence[object] = ()) -> bytes:
    """A value as bytes. shared: objects that the other side already has; they are replaced by their index."""
    return _Pickler(list(shared)).dumped(value)


def loaded(data: bytes, shared: Sequence[object] = ()) -> Any:
    """The inverse of `dumped`. Only for bytes from a process of the same run."""
    return _Unpickler(data, shared).load()


def without_examples(value: object) -> tuple[bytes, list[object]]:
    """A value as bytes, and separately the `Examples` in it, which processes can share."""
    pickler = _Pickler([], Examples)
    return pickler.dumped(value), pickler.shared


def in_shared_memory(value: object) -> Tensor:
    """A value as bytes that other processes can read without a copy."""
    data: Tensor = torch.frombuffer(bytearray(dumped(value)), dtype=torch.uint8).share_memory_()
    return data


class _Pickler(pickle.Pickler):
    """Pickles plain tensors by value; the default would store all memory that a view is part of.

    shared: objects that are left out; those of the type `also` are added to it.
    """

    def __init__(self, shared: list[object], also: type | tuple[()] = ()) -> None:
        self.data, self.shared, self.also = io.BytesIO(), shared, also
        self.numbers = {id(each): number for number, each in enumerate(shared)}
        super().__init__(self.data, pickle.HIGHEST_PROTOCOL)

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
        return _tensor, (pickle.PickleBuffer(obj.reshape(-1).view(torch.uint8).numpy()), obj.dtype, tuple(obj.shape))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, shared: Sequence[object]) -> None:
        super().__init__(io.BytesIO(data))
        self.shared = shared

    def persistent_load(self, number: int) -> object:
        return self.shared[number]


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor in the memory of `data`: an update may have gigabytes, which are copied as seldom as possible."""
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
