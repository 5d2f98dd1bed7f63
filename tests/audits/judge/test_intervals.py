from __future__ import annotations

import math

import numpy as np
import pytest
from bench.coverage import KINDS, Kind, chosen, coverage, percentile, student
from hypothesis import given
from hypothesis import strategies as st
from tests.seeds import replayed

from leaktight.audits.judge.statistics import interval, rate_interval

REPETITIONS = 400
LEAST = 0.95 - 3 * math.sqrt(0.95 * 0.05 / REPETITIONS)
BY_NAME = {kind.name: kind for kind in KINDS}
HARD = ("ssim, bimodal 0.3", "ssim, bimodal 0.9", "psnr, bimodal 0.05", "ssim, skewed, mostly near 0")


@pytest.mark.parametrize("name", [*HARD, "ssim, unimodal, middling", "ssim, around 0, some below"])
def test_intervals_of_five_victims_hold_the_mean(name: str) -> None:
    assert coverage(chosen, BY_NAME[name], 5, REPETITIONS).share >= LEAST


@pytest.mark.parametrize("name", HARD)
def test_the_check_tells_a_bad_interval(name: str) -> None:
    kind: Kind = BY_NAME[name]
    assert coverage(percentile, kind, 5, REPETITIONS).share < LEAST
    assert coverage(student, kind, 5, REPETITIONS).share < LEAST


@given(st.integers(1, 40), st.data())
def test_of_zeros_and_ones_it_is_the_exact_interval_of_a_rate(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    found = interval([1.0] * successes + [0.0] * (trials - successes), 0.0, 1.0)
    assert found[1:] == pytest.approx(rate_interval(successes, trials), abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 7, 50, 300])
def test_limits_are_quantiles_of_averages_with_uniform_weights(count: int) -> None:
    stream = replayed(count).public_numpy()
    values = stream.beta(2, 5, count)
    weights = stream.dirichlet(np.ones(count + 1), 20_000)
    found = interval(values.tolist(), 0.0, 1.0)
    inner = weights[:, :-1] @ values
    assert np.mean(inner <= found.low) == pytest.approx(0.025, abs=0.005)
    assert np.mean(inner + weights[:, -1] > found.high) == pytest.approx(0.025, abs=0.005)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12), st.floats(0.01, 100), st.floats(-50, 50))
def test_the_interval_moves_with_scale_and_origin(values: list[float], scale: float, origin: float) -> None:
    found = interval(values, 0.0, 100.0)
    moved = interval([scale * value + origin for value in values], origin, 100 * scale + origin)
    assert moved == pytest.approx([scale * each + origin for each in found], abs=1e-5 * (1 + scale))


def test_a_value_beyond_the_range_widens_it() -> None:
    within, beyond = interval([0.0, 0.02, 0.05], 0.0, 1.0), interval([-0.02, 0.02, 0.05], 0.0, 1.0)
    assert beyond.low < -0.02 < within.low
    assert beyond.high == pytest.approx(interval([-0.02, 0.02, 0.05], -1.0, 1.0).high)


def test_an_end_that_is_unknown_has_the_limit_of_student() -> None:
    values = [0.1, 0.3, 0.2, 0.6]
    assert interval(values, 0.0, None).high == interval(values, None, None).high
    assert interval(values, 0.0, None).low == interval(values, 0.0, 9.0).low
