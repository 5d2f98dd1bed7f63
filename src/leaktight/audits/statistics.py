"""Means over trials with bootstrap intervals, and how sure "none of them" is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from leaktight.core.rng import Rng

CONFIDENCE = 0.95
RESAMPLES = 2000


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], *, rng: Rng) -> Interval:
    """The mean over trials with the percentile interval of 2000 resamples of them. A single trial has no width.

    Reference: Efron, Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.
    """
    data = np.asarray(values, dtype=np.float64)
    places = rng.public_numpy().integers(0, len(data), (RESAMPLES, len(data)))
    low, high = np.quantile(data[places].mean(1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(data.mean()), float(low), float(high))


def upper_bound(successes: int, trials: int) -> float:
    """The largest rate that so few successes leave possible, with 95 % confidence (Clopper and Pearson, one-sided).

    >>> round(upper_bound(0, 5), 2), round(upper_bound(0, 59), 2), upper_bound(3, 3)
    (0.45, 0.05, 1.0)
    """
    from scipy.special import betaincinv  # slow to import

    return 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, CONFIDENCE))
