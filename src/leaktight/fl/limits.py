"""How much a client may send: checked before it is decoded, so that one client cannot fill the server's memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from leaktight.core.errors import UntrustedError
from leaktight.core.tensors import SKELETON, num_bytes
from leaktight.core.types import Params

_BASE = 64 * 2**20  # keys and boxes of encrypted aggregation, for hundreds of clients
_PLAIN, _SEALED = 3, 64  # times the model: float64 in place of float32; ciphertexts (CKKS: 32)
_HEAD_OF_TENSOR = 1024  # bytes that describe one tensor: its name (twice), type, shape and place


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one answer.

    most_bytes: its size. longest_text: letters of a text in it, such as the name of a tensor. most_tensors: their
    number. most_items: numbers, texts, names and lists in it, other than tensors' values. largest_number: of whole
    numbers.
    """

    most_bytes: int = 2**30
    longest_text: int = 500
    most_tensors: int = 10_000
    most_items: int = 100_000
    largest_number: int = 2**53

    @classmethod
    def of_model(cls, params: Params, buffers: Params, *, sealed: bool) -> Limits:
        """The limits in a federation with this model. sealed: whether updates are encrypted, and larger for that."""
        size, count = num_bytes(params) + num_bytes(buffers), len(params) + len(buffers)
        longest = max((len(name) for name in (*params, *buffers)), default=0)
        return cls(
            most_bytes=_BASE + (_SEALED if sealed else _PLAIN) * size,
            longest_text=max(cls.longest_text, longest),
            most_tensors=2 * count + 100,
            most_items=cls.most_items + 20 * count,
        )

    def check_bytes(self, data: bytes) -> None:
        """Raise `UntrustedError` unless packed bytes (`core.tensors.pack`) keep the limits; reads nothing but heads."""
        self._require("bytes", len(data), self.most_bytes)
        head = int.from_bytes(data[:8], "little")
        self._require("bytes of names of tensors", head, _HEAD_OF_TENSOR * self.most_tensors)
        self._require("tensors", data.count(b'"data_offsets"', 0, 8 + head), self.most_tensors)
        # The skeleton (JSON) can be anywhere; counting it with everything else would count values of tensors.
        start, stop = _place_of_skeleton(data[8 : 8 + head])
        items = sum(data.count(sign, 8 + head + start, 8 + head + stop) for sign in (b",", b"[", b"{"))
        self._require("items", items, self.most_items)

    def check_values(self, value: object, tensors: set[int] | None = None) -> None:
        """Raise `UntrustedError` unless the texts and whole numbers of decoded content keep the limits.

        tensors: those found so far. One in many places would make much work of few bytes.
        """
        tensors = set() if tensors is None else tensors
        if isinstance(value, Tensor):
            if id(value) in tensors:
                raise UntrustedError("expected each tensor once, got one in several places")
            tensors.add(id(value))
        elif isinstance(value, str):
            self._require("letters in a text", len(value), self.longest_text)
        elif isinstance(value, int):
            self._require("as the size of a number", abs(value), self.largest_number)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                self.check_values(name)
                self.check_values(item, tensors)
        elif isinstance(value, list):
            for item in value:
                self.check_values(item, tensors)

    @staticmethod
    def _require(what: str, found: int, most: int) -> None:
        if found > most:
            shown = str(found) if found < 10**18 else "far more"
            raise UntrustedError(f"expected at most {most} {what}, got {shown}")


def _place_of_skeleton(head: bytes) -> tuple[int, int]:
    """Where the skeleton of packed bytes begins and ends, by the head of the safetensors format."""
    start, stop = json.loads(head)[SKELETON]["data_offsets"]
    return int(start), int(stop)
