"""The statistics of verdicts: intervals and bounds over victims, and tests of "the guess ignores the update"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from leaktight.core.rng import Rng

CONFIDENCE = 0.95
ERROR = 1 - CONFIDENCE
"""The largest probability that a run says more than "nothing found" of attacks that ignore the update."""
_DRAWS = 10_000
_MISS = 1.52
"""Standard deviations: if two equal normal scores lie on both sides of a gap of this size, in at most 5 % of cases.

Both on their sides has the probability Phi(-gap / 2) squared at most.
"""


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float], low: float | None, high: float | None) -> Interval:
    """The mean of the values and its 95 % interval: Gaffke's for values between `low` and `high`, else Student's.

    Reference: Gaffke 2005; Learned-Miller and Thomas 2019.
    """
    data = np.sort(np.asarray(values, dtype=np.float64))
    if low is None or high is None:
        return _student(data)
    weights = Rng(0).child("interval", len(data)).public_numpy().dirichlet(np.ones(len(data) + 1), _DRAWS)
    inner = weights[:, :-1] @ data
    lower = np.quantile(weights[:, :-1][:, ::-1] @ data + weights[:, -1] * low, ERROR / 2)
    upper = np.quantile(inner + weights[:, -1] * high, 1 - ERROR / 2)
    return Interval(float(data.mean()), float(lower), float(upper))


def _student(data: np.ndarray) -> Interval:
    """Student's interval; one value gives an interval of width 0."""
    from scipy.special import stdtrit  # slow to import

    middle, freedom = float(data.mean()), len(data) - 1
    half = float(stdtrit(freedom, 1 - ERROR / 2) * data.std(ddof=1) / math.sqrt(len(data))) if freedom else 0.0
    return Interval(middle, middle - half, middle + half)


def upper_bound(successes: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """The upper confidence bound of a success rate (Clopper and Pearson, one-sided).

    >>> round(upper_bound(0, 5), 2), round(upper_bound(0, 59), 2), upper_bound(3, 3)
    (0.45, 0.05, 1.0)
    """
    from scipy.special import betaincinv  # slow to import

    return 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, confidence))


def rate_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % confidence interval of a success rate (Clopper and Pearson).

    >>> [round(each, 2) for each in rate_interval(2, 5)]
    [0.05, 0.85]
    """
    side = 1 - ERROR / 2
    return 1 - upper_bound(trials - successes, trials, side), upper_bound(successes, trials, side)


def victims_needed(share: float) -> int:
    """The least number of victims of whom none was reconstructed that shows a rate of at most `share`.

    >>> victims_needed(0.15), victims_needed(0.45), victims_needed(0.05)
    (19, 6, 59)
    """
    return math.ceil(math.log(ERROR) / math.log1p(-share))


def fisher(chances: Sequence[float]) -> float:
    """The probability of such chances or smaller ones if each is uniform or larger (Fisher's method).

    >>> fisher([0.05]), round(fisher([0.05, 0.05]), 4)
    (0.05, 0.0175)
    """
    from scipy.special import gammaincc  # slow to import

    if len(chances) == 1:
        return chances[0]
    return float(gammaincc(len(chances), -sum(math.log(each) for each in chances)))


def holm(chances: Sequence[float]) -> list[float]:
    """The chances, corrected for their number (Holm's method), in the same order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [1.0] * len(chances)
    highest = 0.0
    for place, index in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        highest = max(highest, min(1.0, (len(chances) - place) * chances[index]))
        corrected[index] = highest
    return corrected


def clear_chance(level: float) -> float:
    """The chance below which a result is so clear that a repetition would miss `level` in at most 5 % of cases."""
    from scipy.special import ndtr, ndtri  # slow to import

    return float(ndtr(ndtri(level) - _MISS))
