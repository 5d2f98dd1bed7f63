"""The attacker on noise that was cut off: where it is at its limit, subtracting the limit gives the value back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating]


def recovered(seen: Numbers, truth: Numbers, limits: Sequence[float], *, within: float) -> float:
    """The largest share of values that an attacker finds, up to `within`, from values with noise.

    It takes every number of `limits` for the one at which noise was cut off, and the largest number seen too; it
    subtracts that, with the sign of what it sees. 0 among the limits: it believes what it sees.
    """
    tried = [*limits, float(np.abs(seen).max())]
    return max(float((np.abs(seen - np.sign(seen) * limit - truth) <= within).mean()) for limit in tried)


def chance(noise_std: float, within: float, count: int, tries: int) -> float:
    """What `recovered` stays below, but once in a million, where noise is normal: a guess is close by luck alone."""
    luck = 2 * within / (noise_std * math.sqrt(2 * math.pi))  # the density is nowhere larger than at 0
    return luck + 5.5 * math.sqrt(max(luck, 1 / count) / count) + tries / count
