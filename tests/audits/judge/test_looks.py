"""Going on after a look at the results: how often a person who stops at will is misled."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from tests.seeds import replayed

from leaktight.audits.judge.statistics import fisher, looks_factor, upper_bound, victims_needed
from leaktight.results.schema import ERROR


def misled(seed: int, runs: int, *, sizes: list[int], corrected: bool) -> float:
    """The share of runs of attacks that ignore the update in which a leak is claimed at one of the looks.

    sizes: the victims at each look. The person stops at the first claim.
    """
    chances = replayed(seed).public_numpy().uniform(size=(runs, sizes[-1]))
    logs = np.cumsum(-2 * np.log(chances), axis=1)
    claimed = np.zeros(runs, dtype=bool)
    for earlier, size in enumerate(sizes):
        own: NDArray[np.float64] = stats.chi2.sf(logs[:, size - 1], 2 * size)
        claimed |= own * (looks_factor(earlier) if corrected else 1) <= ERROR
    return float(claimed.mean())


def test_the_simulated_test_is_that_of_the_judge() -> None:
    chances = replayed(3).public_numpy().uniform(size=5)
    own = stats.chi2.sf(-2 * np.log(chances).sum(), 10)
    assert own == pytest.approx(fisher(chances.tolist()))


def test_who_goes_on_until_a_leak_shows_is_misled_in_at_most_a_tenth_of_runs() -> None:
    often = list(range(2, 42))
    assert misled(11, 20_000, sizes=[10], corrected=True) == pytest.approx(ERROR, abs=0.006), "without a look before"
    assert misled(12, 20_000, sizes=often, corrected=False) > 0.15, "what the correction is for"
    for sizes in ([2, 10], [5, 20], [5, 10, 20, 40], often):
        assert misled(13, 20_000, sizes=sizes, corrected=True) <= 2 * ERROR


def test_all_later_looks_together_err_as_often_as_the_first() -> None:
    assert math.fsum(1 / looks_factor(earlier) for earlier in range(1, 100_000)) == pytest.approx(1, abs=1e-4)


def test_nothing_found_holds_whenever_somebody_stops() -> None:
    """ "None of N" for N or more victims needs that the first N were none, whatever was seen in between."""
    rate, runs = 0.15, 20_000
    leaks = replayed(5).public_numpy().uniform(size=(runs, 60)) < rate
    clean = np.cumsum(leaks, axis=1) == 0
    bound = np.array([upper_bound(0, number + 1) for number in range(60)])
    claimed = (clean & (bound < rate)).any(axis=1)
    assert bound[victims_needed(rate) - 1] < rate
    assert claimed.mean() <= ERROR
