"""Many bounded numbers packed in one large integer, so that sums of the integers are sums of the numbers.

A value v in [-bound, bound] becomes a whole number from 0 to 2 L: round(v L / bound) + L, L = 2^(value_bits - 1) - 1.
Each has a slot of the integer, wide enough for the largest weighted sum and its noise, so that slots do not overflow.

>>> shape = Slots(value_bits=8, weight_bits=3, bound=1.0, noise_bound=0.0, capacity=64)
>>> integers = shape.pack(shape.quantise(np.array([0.5, -1.0, 1.0])))
>>> shape.values(shape.unpack([3 * integer for integer in integers], 3), weight=3).round(2).tolist()
[0.5, -1.0, 1.0]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leaktight.crypto.cipher import CiphertextError, Noise, Values

Levels = NDArray[np.int64]
_CHUNK = 2048  # integers packed at a time, with one byte per bit


@dataclass(frozen=True)
class Slots:
    """The layout of values in integers of `capacity` bits.

    value_bits: of one quantised value. weight_bits: the integer weights of a sum add up to at most 2^weight_bits.
    bound: the largest absolute value. noise_bound: the largest absolute noise on a mean; 0: no noise.
    """

    value_bits: int
    weight_bits: int
    bound: float
    noise_bound: float
    capacity: int

    @property
    def width(self) -> int:
        """Bits of a slot: the largest content is (2 L + 2 M) 2^weight_bits < 2^width, M the level of the noise."""
        return ((self.top + self.noise_top) << (self.weight_bits + 1)).bit_length()

    @property
    def per_integer(self) -> int:
        return self.capacity // self.width

    @property
    def top(self) -> int:
        """L, the level of the bound."""
        return (1 << (self.value_bits - 1)) - 1

    @property
    def noise_top(self) -> int:
        """M, one level above that of the noise bound, because products of floats are rounded."""
        return math.ceil(self.noise_bound / self.step) + 1 if self.noise_bound else 0

    @property
    def step(self) -> float:
        """The distance between neighbouring levels."""
        return self.bound / self.top

    def num_integers(self, count: int) -> int:
        return -(-count // self.per_integer)

    def quantise(self, values: Values) -> Levels:
        """The levels, from 0 to 2 L, of values within the bound."""
        levels: Levels = np.rint(values.astype(np.float64) * (self.top / self.bound)).astype(np.int64) + self.top
        return levels

    def noise_levels(self, noise: Noise, weight: int) -> Levels:
        """Noise within its bound on a mean, as levels of a sum with this weight, shifted to start at 0."""
        levels: Levels = (
            np.rint(noise.astype(np.float64) * (weight / self.step)).astype(np.int64) + weight * self.noise_top
        )
        return levels

    def values(self, sums: Levels, *, weight: int, noisy: bool = False) -> Values:
        """The means of sums of levels; an impossible sum is an error."""
        most = 2 * weight * (self.top + (self.noise_top if noisy else 0))
        if len(sums) and not (int(sums.min()) >= 0 and int(sums.max()) <= most):
            raise CiphertextError(
                "decryption gave values out of range: the ciphertext was damaged or not made by this protocol"
            )
        result: Values = (sums - most // 2).astype(np.float64) * (self.step / weight)
        return result

    def pack(self, levels: Levels) -> list[int]:
        """Levels (d,) as integers, `per_integer` to each; unused slots are 0."""
        places = np.arange(self.width, dtype=np.uint64)
        result: list[int] = []
        for start in range(0, len(levels), _CHUNK * self.per_integer):
            part = levels[start : start + _CHUNK * self.per_integer].astype(np.uint64)
            rows = self.num_integers(len(part))
            padded = np.zeros(rows * self.per_integer, dtype=np.uint64)
            padded[: len(part)] = part
            bits = ((padded[:, None] >> places) & np.uint64(1)).astype(np.uint8).reshape(rows, -1)
            result += [int.from_bytes(row.tobytes(), "little") for row in np.packbits(bits, axis=1, bitorder="little")]
        return result

    def unpack(self, integers: Sequence[int], count: int) -> Levels:
        """The inverse of `pack` for the first `count` slots."""
        size = self.per_integer * self.width
        if any(integer >> size for integer in integers) or len(integers) != self.num_integers(count):
            raise CiphertextError(
                f"decryption did not give {count} packed values: the ciphertext was damaged or not made "
                "by this protocol"
            )
        powers = np.uint64(1) << np.arange(self.width, dtype=np.uint64)
        parts = []
        for start in range(0, len(integers), _CHUNK):
            rows = [integer.to_bytes(-(-size // 8), "little") for integer in integers[start : start + _CHUNK]]
            packed = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), -1)
            bits = np.unpackbits(packed, axis=1, count=size, bitorder="little").reshape(-1, self.width)
            parts.append((bits * powers).sum(axis=1, dtype=np.uint64).astype(np.int64))
        levels: Levels = np.concatenate(parts)[:count]
        return levels
