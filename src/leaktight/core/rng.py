"""Randomness as a tree: a stream is named by its path, so a new consumer shifts no other stream.

An `Rng` is a value, not a stream. Ask it for a child, or for a generator to draw from; asking twice gives the same
generator twice.

>>> a = Rng(7).child("client", 3, "round", 1)
>>> a == Rng(7).child("client", 3).child("round", 1)
True
>>> bool(torch.equal(torch.rand(2, generator=a.torch()), torch.rand(2, generator=a.torch())))
True
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

_TYPE_TAG = {int: b"i", str: b"s"}


@dataclass(frozen=True)
class Rng:
    """A named place in the tree of random streams. Draw on the CPU, then move."""

    seed: int
    path: tuple[int | str, ...] = ()

    @classmethod
    def fresh(cls) -> Rng:
        """A root from the operating system's entropy: what a defense in production uses."""
        return cls(secrets.randbits(128))

    def child(self, *path: int | str) -> Rng:
        return Rng(self.seed, self.path + path)

    def entropy(self, num_bytes: int = 32) -> int:
        """An integer that depends on the seed and on the whole path, and on nothing else."""
        digest = hashlib.blake2b(digest_size=num_bytes)
        for part in (self.seed, *self.path):
            encoded = str(part).encode()
            digest.update(_TYPE_TAG[type(part)] + len(encoded).to_bytes(8, "big") + encoded)
        return int.from_bytes(digest.digest(), "big")

    def torch(self) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(self.entropy(8) >> 1)

    def numpy(self) -> np.random.Generator:
        return np.random.default_rng(self.entropy())


@contextmanager
def global_seed(rng: Rng) -> Iterator[None]:
    """Run code that draws from PyTorch's global generator (initialisation, dropout); restore the generator after.

    This is the one place where a global seed is set.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.entropy(8) >> 1)  # noqa: TID251
        yield
