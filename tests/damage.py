"""Damage to files, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.seeds import replayed


def flipped(path: Path, count: int = 5) -> Iterator[int]:
    """Flip one bit at a time: in the first byte, the last, and others. Gives the place; the file is restored after."""
    content, draw = path.read_bytes(), replayed(1).public_numpy()
    for place in (0, *draw.integers(len(content), size=count - 2).tolist(), len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(draw.integers(8))
        path.write_bytes(damaged)
        yield place
        path.write_bytes(content)
