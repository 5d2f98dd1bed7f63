"""Damage to files and to libraries, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
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


def undecomposed_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the first least-squares solution fail as LAPACK's decomposition can; gives the number of calls so far."""
    least_squares, calls = scipy.optimize.least_squares, [0]

    def fails_first(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise np.linalg.LinAlgError("SVD did not converge")
        return least_squares(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "least_squares", fails_first)
    return calls
