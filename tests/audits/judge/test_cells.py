from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.results.made import changed, made_trial, panel

from leaktight.audits.judge.cells import THRESHOLDS, CellTrials, best_controls, by_victim, gather, place_of
from leaktight.results.schema import Trial


def reconstructs(trial: Trial, controls: Mapping[str, list[float]]) -> bool:
    return CellTrials([trial], {place_of(trial): controls}).reconstructs(trial)


def cell_of(lines: list[Trial], defense: str, attack: str = "csdlg") -> CellTrials:
    return next(cell for cell in gather(lines) if (cell.defense, cell.attack) == (defense, attack))


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
    assert reconstructs(made_trial("none", "csdlg", ssim=ssim, psnr=psnr), controls) is leaked


@pytest.mark.parametrize("metric", THRESHOLDS)
def test_a_score_that_hardly_beats_the_control_is_no_leak(metric: str) -> None:
    least, margin = THRESHOLDS[metric]
    trial = made_trial(scores={"ssim": [0.0], "psnr": [0.0]} | {metric: [least + 0.01]})
    assert reconstructs(trial, {metric: [least + 0.01 - margin]})
    assert not reconstructs(trial, {metric: [least + 0.02 - margin]})


def test_a_guess_that_is_as_close_to_a_decoy_is_no_reconstruction() -> None:
    trial = made_trial(ssim=[0.9], psnr=[10.0], decoy_scores={"ssim": [0.85], "psnr": [12.0]})
    assert reconstructs(trial, {"ssim": [0.3]})
    assert not reconstructs(changed(trial, decoy_scores={"ssim": [0.9], "psnr": [12.0]}), {"ssim": [0.3]})


@pytest.mark.parametrize(("psnr", "decoy", "exact"), [(45.0, 20.0, True), (45.0, 36.0, False), (29.0, 5.0, False)])
def test_an_exact_example_is_far_from_every_decoy(psnr: float, decoy: float, exact: bool) -> None:
    trial = made_trial(ssim=[0.9], psnr=[psnr], decoy_scores={"psnr": [decoy]})
    assert CellTrials([trial], {}).exact is exact


def test_controls_are_those_of_the_same_victim_the_best_for_each_example() -> None:
    lines = [
        made_trial("none", "mean_image", 0, ssim=[0.1, 0.5], role="control"),
        made_trial("none", "prior_only", 0, ssim=[0.3, None], role="control"),
        made_trial("none", "mean_image", 1, ssim=[0.9, 0.9], role="control"),
        made_trial("none", "csdlg", 0, ssim=[1.0, 1.0]),
    ]
    assert best_controls(lines)["diagnostic", "none", 0, 0, None]["ssim"] == [0.3, 0.5]


def test_a_cell_is_what_its_lines_say() -> None:
    lines = [*panel(trials=4), made_trial("noise", "csdlg", 4, status="failed", error="no", scores={})]
    cell = cell_of(lines, "noise")
    assert (len(cell.trials), len(cell.done), cell.success_rate) == (5, 4, 0.0)
    interval, gain = cell.interval("ssim"), cell.gain("ssim")
    assert interval is not None
    assert interval.mean == pytest.approx(sum(cell.values("ssim").values()) / 4)
    assert cell.most_leaking() == "noise.csdlg.t003.r000"
    assert cell.control("ssim") == pytest.approx(0.25)
    assert gain == pytest.approx(0.3015 - 0.25)
    assert cell_of(lines, "none").success_rate == 1.0


def test_a_low_mse_is_the_most_leaking_one() -> None:
    lines = [
        made_trial("none", "csdlg", n, scores={"mse": [0.1 * (n + 1)], "psnr": [1.0], "ssim": [0.0]}) for n in (0, 1)
    ]
    cell = cell_of(lines, "none")
    assert cell.most_leaking("mse") == "none.csdlg.t000.r000"


@pytest.mark.parametrize("others", [[0.2, 0.7], [0.2, 0.7, 0.3]], ids=["as many", "more"])
def test_an_attack_on_other_examples_has_to_beat_the_best_control(others: list[float]) -> None:
    """As one that asks for further rounds, in which the client draws anew."""
    lines = [
        made_trial(attack="fishing", ssim=[0.75, 0.1], examples="second round"),
        made_trial(attack="mean_image", ssim=others, role="control", examples="first round"),
    ]
    assert not cell_of(lines, "none", "fishing").reconstructed
    better = [changed(lines[0], scores={"ssim": [0.95, 0.1]}), lines[1]]
    assert cell_of(better, "none", "fishing").reconstructed


def test_victims_are_one_if_a_chain_of_trials_joins_them() -> None:
    seen = [(0, "a"), (0, "b"), (1, "c"), (1, "b"), (2, "d")]
    lines = [
        made_trial(trial=trial, round_index=at % 2, examples=examples) for at, (trial, examples) in enumerate(seen)
    ]
    assert [[line.trial for line in group] for group in by_victim(lines)] == [[0, 0, 1, 1], [2]]
