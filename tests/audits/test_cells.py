from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.results.made import made_trial, panel
from tests.seeds import replayed

from leaktight.audits.cells import THRESHOLDS, CellTrials, best_controls, bootstrap, gather, leaks, upper_bound
from leaktight.results.schema import Trial

scores = st.lists(st.floats(-1, 100), min_size=1, max_size=12)


def cell_of(lines: list[Trial], defense: str, attack: str = "csdlg") -> CellTrials:
    return next(cell for cell in gather(lines, 0) if (cell.defense, cell.attack) == (defense, attack))


@pytest.mark.parametrize(
    ("ssim", "psnr", "leaked"),
    [
        ([0.65], [10.0], True),
        ([0.55], [10.0], False),
        ([0.2], [25.0], True),
        ([0.2], [19.0], False),
        ([0.1, 0.9], [5.0, 5.0], True),
        ([None, 0.1], [None, 5.0], False),
    ],
    ids=["ssim", "ssim below", "psnr", "psnr below", "one of two", "not finite"],
)
def test_a_trial_leaks_by_either_score(ssim: list[float | None], psnr: list[float | None], leaked: bool) -> None:
    controls = {"ssim": [0.3] * len(ssim), "psnr": [12.0] * len(ssim)}
    assert leaks(made_trial("none", "csdlg", ssim=ssim, psnr=psnr), controls) is leaked


@pytest.mark.parametrize("metric", THRESHOLDS)
def test_a_score_that_hardly_beats_the_control_is_no_leak(metric: str) -> None:
    least, margin = THRESHOLDS[metric]
    trial = made_trial(scores={"ssim": [0.0], "psnr": [0.0]} | {metric: [least + 0.01]})
    assert leaks(trial, {metric: [least + 0.01 - margin]})
    assert not leaks(trial, {metric: [least + 0.02 - margin]})


def test_controls_are_those_of_the_same_victim_the_best_for_each_example() -> None:
    lines = [
        made_trial("none", "mean_image", 0, ssim=[0.1, 0.5], role="control"),
        made_trial("none", "prior_only", 0, ssim=[0.3, None], role="control"),
        made_trial("none", "mean_image", 1, ssim=[0.9, 0.9], role="control"),
        made_trial("none", "csdlg", 0, ssim=[1.0, 1.0]),
    ]
    assert best_controls(lines)["none", 0, 0]["ssim"] == [0.3, 0.5]


def test_a_cell_is_what_its_lines_say() -> None:
    lines = [*panel(trials=4), made_trial("noise", "csdlg", 4, status="failed", error="no", scores={})]
    cell = cell_of(lines, "noise")
    assert (len(cell.trials), len(cell.done), cell.success_rate) == (5, 4, 0.0)
    interval, gain = cell.interval("ssim"), cell.gain("ssim")
    assert interval is not None
    assert interval.mean == pytest.approx(sum(cell.values("ssim").values()) / 4)
    assert cell.most_leaking() == "noise.csdlg.t003.r000"
    assert cell.control("ssim") == pytest.approx(0.25)
    assert gain is not None
    assert gain.mean == pytest.approx(0.3015 - 0.25)
    assert cell_of(lines, "none").success_rate == 1.0


def test_a_low_mse_is_the_most_leaking_one() -> None:
    lines = [
        made_trial("none", "csdlg", n, scores={"mse": [0.1 * (n + 1)], "psnr": [1.0], "ssim": [0.0]}) for n in (0, 1)
    ]
    cell = cell_of(lines, "none")
    assert cell.most_leaking("mse") == "none.csdlg.t000.r000"


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
