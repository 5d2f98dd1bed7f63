"""The statistics of verdicts: intervals and bounds over victims, and tests of "the guess ignores the update"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from leaktight.results.schema import CONFIDENCE, ERROR

_TINY = 1e-9
_MISS = 2.0
"""Standard deviations. Two normal scores with one mean lie on the two sides of a gap of this size in at most 2.5 % of
cases: Phi(-gap / 2) squared. Ranks are not quite normal, so that there is room up to 5 %.
"""


Numbers: TypeAlias = NDArray[np.float64]


def looks_factor(earlier: int) -> int:
    """What chances are multiplied by after `earlier` looks at fewer trials: 1, then 2, 6, 12, 20 ...

    The first look errs in at most 5 % of cases. The inverses of all later factors add up to 1: together they err in at
    most 5 % more, whenever somebody stops.

    >>> [looks_factor(number) for number in range(5)]
    [1, 2, 6, 12, 20]
    """
    return earlier * (earlier + 1) if earlier else 1


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float], low: float | None, high: float | None) -> Interval:
    """The mean of the values, one per victim, and its 95 % interval.

    low, high: the ends of the values' range. An end that is known gives Gaffke's limit on its side, which holds for any
    distribution in the range, bimodal ones with few values as well. Student's limit is for ends that are unknown
    (None), and for ends that values lie beyond if it is the wider one.

    References: Gaffke, Three Test Statistics for a Nonparametric One-Sided Hypothesis on the Mean of a Nonnegative
    Variable, 2005; Learned-Miller and Thomas, A New Confidence Interval for the Mean of a Bounded Random Variable,
    2019.

    >>> [round(each, 2) for each in interval([1, 1, 1, 1, 1], 0.0, 1.0)]
    [1.0, 0.48, 1.0]
    >>> [round(each, 2) for each in interval([0.2, 0.3, 0.4], None, None)]
    [0.3, 0.05, 0.55]
    """
    data = np.sort(np.asarray(values, dtype=np.float64))
    middle = float(data.mean())
    lower = -_upper_limit(-data[::-1], None if low is None else -low)
    return Interval(middle, min(lower, middle), max(_upper_limit(data, high), middle))


def _upper_limit(data: Numbers, end: float | None) -> float:
    """The upper limit of the mean. data: in ascending order."""
    if end is None:
        return _student(data)
    if data[-1] > end:
        return max(_student(data), _gaffke(data, float(data[-1])))
    return _gaffke(data, end)


def _gaffke(data: Numbers, end: float) -> float:
    """The 97.5 % quantile of the average of the data and the end of their range with weights that are uniform.

    The distribution of such an average is an integral of the B-spline whose knots are the data and the end (Curry and
    Schoenberg 1966).
    """
    from scipy.interpolate import BSpline  # slow to import
    from scipy.optimize import brentq

    count, width = len(data), end - float(data[0])
    if width < _TINY:
        return end
    inner = np.round((data - data[0]) / width, 12)  # knots that differ by a rounding error are one
    spline = BSpline(np.repeat([0, *inner, 1], [count, *[1] * count, count + 1]), np.repeat([0.0, 1.0], count), count)
    place = float(brentq(lambda mean: float(spline(mean)) - (1 - ERROR / 2), _TINY, 1 - _TINY))
    return end - width * (1 - place)


def _student(data: Numbers) -> float:
    """Student's upper limit of the mean; of one value, the value."""
    from scipy.special import stdtrit  # slow to import

    freedom = len(data) - 1
    half = float(stdtrit(freedom, 1 - ERROR / 2) * data.std(ddof=1) / math.sqrt(len(data))) if freedom else 0.0
    return float(data.mean()) + half


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
    """The chance below which a result is so clear that a repetition would rarely miss `level`."""
    from scipy.special import ndtr, ndtri  # slow to import

    return float(ndtr(ndtri(level) - _MISS))
