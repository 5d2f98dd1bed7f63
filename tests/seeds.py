"""Trees of random streams that can be replayed: in tests there is nobody to protect."""

from __future__ import annotations

import hashlib

from leaktight.core.rng import Rng


def replayed(seed: int = 0) -> Rng:
    """A tree with both roots, the same for the same number."""
    return Rng(seed, key=hashlib.sha256(f"test {seed}".encode()).digest())
