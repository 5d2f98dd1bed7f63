"""An attacker who tries many seeds of PyTorch's CPU generator at once, and looks which one explains what was drawn.

The generator is a Mersenne Twister that keeps 32 bits of its seed. Its first outputs need few words of its state, which
are computed here for thousands of seeds together: about 0.3 microseconds a seed, so twenty minutes for all there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[Any]
Law: TypeAlias = Callable[[Numbers], Numbers]
"""What a generator draws first, (draws, seeds), from its first words (words, seeds)."""

WORDS = 64
"""How many words of each generator the attacker computes."""
DRAWS = 32
"""How many draws are compared."""
ALIKE = 0.95
"""A correlation over 32 draws that unrelated numbers reach once in 1e16."""
_MIDDLE = 397
_CHUNK = 1 << 15


def first_words(seeds: Numbers, count: int = WORDS) -> Numbers:
    """The first outputs of the Mersenne Twister for all these seeds, (count, seeds)."""
    word = seeds.astype(np.uint32)
    low = np.empty((count + 1, len(word)), np.uint32)
    high = np.empty((count, len(word)), np.uint32)
    low[0] = word
    shifted = np.empty_like(word)
    for place in range(1, _MIDDLE + count):
        np.right_shift(word, np.uint32(30), out=shifted)
        word ^= shifted
        word *= np.uint32(1812433253)
        word += np.uint32(place)
        if place <= count:
            low[place] = word
        if place >= _MIDDLE:
            high[place - _MIDDLE] = word
    for place, out in enumerate(high):
        joined = (low[place] & np.uint32(0x80000000)) | (low[place + 1] & np.uint32(0x7FFFFFFF))
        out ^= (joined >> np.uint32(1)) ^ ((joined & np.uint32(1)) * np.uint32(0x9908B0DF))
        _temper(out)
    return high


def _temper(word: Numbers) -> None:
    word ^= word >> np.uint32(11)
    word ^= (word << np.uint32(7)) & np.uint32(0x9D2C5680)
    word ^= (word << np.uint32(15)) & np.uint32(0xEFC60000)
    word ^= word >> np.uint32(18)


def rand32(words: Numbers) -> Numbers:
    """`torch.rand` in float32."""
    return (words & np.uint32(2**24 - 1)).astype(np.float32) * np.float32(2**-24)


def rand64(words: Numbers) -> Numbers:
    """`torch.rand` in float64."""
    both = (words[0::2].astype(np.uint64) << np.uint64(32)) | words[1::2]
    return (both & np.uint64(2**53 - 1)).view(np.int64).astype(np.float64) * 2.0**-53


def randn32(words: Numbers) -> Numbers:
    """`torch.randn` in float32, of 16 numbers or more."""
    return _blocks(rand32(words))


def randn64(words: Numbers) -> Numbers:
    """`torch.randn` in float64, of 16 numbers or more."""
    return _blocks(rand64(words))


def randn_few(words: Numbers) -> Numbers:
    """`torch.randn` in either type, of fewer than 16 numbers."""
    uniform = rand64(words)
    radius, angle = np.sqrt(-2 * np.log1p(-uniform[1::2])), 2 * math.pi * uniform[0::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1, words.shape[1])


def laplace32(words: Numbers) -> Numbers:
    """The logarithm of the ratio of two neighbouring numbers of `torch.rand`."""
    uniform = 1 - rand32(words)
    values: Numbers = np.log(uniform[0::2] / uniform[1::2])
    return values


def randperm(count: int) -> Law:
    """The first numbers of `torch.randperm`."""

    def law(words: Numbers) -> Numbers:
        seeds = np.arange(words.shape[1])
        order = np.tile(np.arange(count, dtype=np.int64)[:, None], (1, len(seeds)))
        for place in range(min(DRAWS, count - 1)):
            other = (words[place] % np.uint32(count - place)).astype(np.int64) + place
            order[place], order[other, seeds] = order[other, seeds], order[place].copy()
        return order[:DRAWS]

    return law


def _blocks(uniform: Numbers) -> Numbers:
    """Box and Muller's transform as PyTorch has it: eight radii, then their eight angles."""
    groups = uniform[: len(uniform) // 16 * 16].reshape(-1, 2, 8, uniform.shape[1])
    radius, angle = np.sqrt(-2 * np.log(1 - groups[:, 0])), 2 * math.pi * groups[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1, uniform.shape[1])


@dataclass(frozen=True)
class Sight:
    """Draws of a client that an attacker has got hold of, and how a generator would have made them."""

    law: Law
    values: Numbers


@dataclass(frozen=True)
class Found:
    """The seed that explains a sight best, and the correlation of its draws with it."""

    seed: int
    correlation: float


def windows(centres: Iterable[int], width: int) -> Numbers:
    """All seeds within `width` / 2 of these numbers' last 32 bits."""
    around = np.arange(-(width // 2), width - width // 2, dtype=np.int64)
    middles = np.array(sorted({centre & 0xFFFFFFFF for centre in centres}), dtype=np.int64)
    return np.unique((middles[:, None] + around) & 0xFFFFFFFF)


def scan(sights: Mapping[str, Sight], seeds: Numbers) -> dict[str, Found]:
    """For each sight the seed that explains it best."""
    best = dict.fromkeys(sights, Found(-1, 0.0))
    by_law: dict[Law, list[str]] = {}
    for name, sight in sights.items():
        by_law.setdefault(sight.law, []).append(name)
    for start in range(0, len(seeds), _CHUNK):
        tried = seeds[start : start + _CHUNK]
        words = first_words(tried)
        for law, names in by_law.items():
            wanted = _standard(np.stack([sights[name].values[:DRAWS] for name in names], 1))
            for name, alike in zip(names, np.abs(wanted.T @ _standard(law(words)[:DRAWS])), strict=True):
                place = int(np.argmax(alike))
                if alike[place] > best[name].correlation:
                    best[name] = Found(int(tried[place]), float(alike[place]))
    return best


def _standard(columns: Numbers) -> Numbers:
    """Columns of mean 0 and length 1, whose products are correlations."""
    centred = columns.astype(np.float32)
    centred -= centred.mean(0)
    centred /= np.maximum(np.sqrt(np.einsum("ij,ij->j", centred, centred)), 1e-12)
    return centred


def chunks(first: int, count: int, size: int = 1 << 20) -> Iterator[Numbers]:
    """A long window of seeds piece by piece."""
    for start in range(first, first + count, size):
        yield np.arange(start, min(start + size, first + count), dtype=np.int64) & 0xFFFFFFFF


def scan_long(sights: Mapping[str, Sight], pieces: Iterable[Numbers]) -> dict[str, Found]:
    """As `scan`, over windows that come in pieces."""
    best = dict.fromkeys(sights, Found(-1, 0.0))
    for piece in pieces:
        for name, found in scan(sights, piece).items():
            best[name] = max(best[name], found, key=lambda each: each.correlation)
    return best
