from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.seeds import replayed

from leaktight.audits.judge.statistics import (
    clear_chance,
    fisher,
    holm,
    interval,
    rate_interval,
    upper_bound,
    victims_needed,
)

chances = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=12)


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_the_interval_holds_the_mean_and_lies_within_the_range(values: list[float]) -> None:
    found = interval(values, 0.0, 1.0)
    assert -1e-9 <= found.low <= found.mean + 1e-9
    assert found.mean - 1e-9 <= found.high <= 1 + 1e-9
    assert found == interval(values, 0.0, 1.0), "the same values give the same interval"


def test_without_a_range_the_interval_is_that_of_scipy() -> None:
    values = replayed(7).public_numpy().normal(20, 5, 9)
    other = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = interval(values.tolist(), None, None)
    assert (found.low, found.high) == pytest.approx((other.low, other.high))


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (0, 5), (2, 9), (4, 4)])
def test_the_upper_bound_is_the_rate_that_makes_so_few_successes_unlikely(successes: int, trials: int) -> None:
    bound = upper_bound(successes, trials)
    if successes == trials:
        assert bound == 1.0
    else:
        assert stats.binom.cdf(successes, trials, bound) == pytest.approx(0.05)
    low, high = rate_interval(successes, trials)
    other = stats.binomtest(successes, trials).proportion_ci(0.95)
    assert (low, high) == pytest.approx((other.low, other.high))


@pytest.mark.parametrize("share", [0.05, 0.1, 0.15, 0.3, 0.45])
def test_the_victims_that_a_claim_needs_are_the_fewest(share: float) -> None:
    number = victims_needed(share)
    assert upper_bound(0, number) <= share < upper_bound(0, number - 1)


@given(chances)
def test_combined_chances_are_those_of_scipy(values: list[float]) -> None:
    assert fisher(values) == pytest.approx(stats.combine_pvalues(values).pvalue, rel=1e-6)


@given(chances)
def test_corrected_chances_are_those_of_a_loop(values: list[float]) -> None:
    """Holm: the largest over all chances up to this one of its number of larger ones times it."""
    ordered = sorted(values)
    expected = [
        max(min(1.0, (len(values) - k) * ordered[k]) for k in range(ordered.index(each) + 1)) for each in values
    ]
    found = holm(values)
    assert all(own >= other - 1e-12 for own, other in zip(found, expected, strict=True))
    assert min(found) == pytest.approx(min(1.0, len(values) * min(values)))
    assert all(own >= value for own, value in zip(found, values, strict=True))


def test_a_clear_result_is_rarely_missed_when_repeated() -> None:
    level = 0.05 / 20
    clear, passes = stats.norm.isf(clear_chance(level)), stats.norm.isf(level)
    middles = np.linspace(0, 8, 200)
    both = stats.norm.sf(clear - middles) * stats.norm.cdf(passes - middles)
    assert both.max() == pytest.approx(0.025, abs=0.001)
