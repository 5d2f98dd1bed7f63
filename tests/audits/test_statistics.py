from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.seeds import replayed

from leaktight.audits.statistics import bootstrap, upper_bound

scores = st.lists(st.floats(-1, 100), min_size=1, max_size=12)


@pytest.mark.parametrize("number", [3, 5, 20])
def test_the_interval_is_that_of_scipy(number: int) -> None:
    values = replayed(7).child(number).public_numpy().normal(20, 5, number)
    found = bootstrap(values.tolist(), rng=replayed(1))
    other = stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=0.95,
        method="percentile",
        n_resamples=20000,
        rng=replayed(2).public_numpy(),
    ).confidence_interval
    width = other.high - other.low
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(other.low, abs=0.05 * width)
    assert found.high == pytest.approx(other.high, abs=0.05 * width)


@settings(max_examples=50)
@given(scores)
def test_the_interval_holds_the_mean_and_lies_within_the_values(values: list[float]) -> None:
    found = bootstrap(values, rng=replayed(0))
    slack = 1e-9 * (1 + max(map(abs, values)))
    assert min(values) - slack <= found.low <= found.mean + slack
    assert found.mean - slack <= found.high <= max(values) + slack
    assert found == bootstrap(values, rng=replayed(0)), "the same seed gives the same interval"


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (0, 5), (2, 9), (4, 4)])
def test_the_upper_bound_is_the_rate_that_makes_so_few_successes_unlikely(successes: int, trials: int) -> None:
    bound = upper_bound(successes, trials)
    if successes == trials:
        assert bound == 1.0
    else:
        assert stats.binom.cdf(successes, trials, bound) == pytest.approx(0.05)
