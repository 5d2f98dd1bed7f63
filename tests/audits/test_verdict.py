from __future__ import annotations

import pytest
from tests.results.made import KNOWING, THREAT, changed, made_trial, panel

from leaktight.audits.cells import gather
from leaktight.audits.verdict import verdicts
from leaktight.results.schema import Trial, Verdict


def judged(lines: list[Trial]) -> dict[str, Verdict]:
    return {verdict.defense: verdict for verdict in verdicts(gather(lines, 0))}


def test_a_defense_that_stops_a_working_attack() -> None:
    found = judged(panel())
    assert (found["none"].verdict, found["noise"].verdict) == ("leaks", "not-found")
    assert "5 of 5 victims" in found["none"].because
    assert "fewer than 45 %" in found["noise"].because
    assert found["none"].trial_id == "none.csdlg.t004.r000"


def test_an_attack_that_fails_without_a_defense_proves_nothing() -> None:
    found = judged(panel(leaking=0.3, defended=0.1))
    assert {each.verdict for each in found.values()} == {"cannot-conclude"}
    assert "even without a defense" in found["noise"].because


def test_a_leak_counts_even_if_the_attack_fails_without_the_defense() -> None:
    assert judged(panel(leaking=0.3, defended=0.9))["noise"].verdict == "leaks"


@pytest.mark.parametrize(("trials", "verdict"), [(2, "cannot-conclude"), (3, "not-found")])
def test_too_few_trials_prove_no_safety(trials: int, verdict: str) -> None:
    assert judged(panel(trials=trials))["noise"].verdict == verdict
    assert judged(panel(trials=trials))["none"].verdict == "leaks"


def test_partly_is_some_victims_or_a_clear_gain_over_the_controls() -> None:
    some = [*panel(trials=4), made_trial("noise", "csdlg", 4, ssim=[0.9])]
    assert judged(some)["noise"].verdict == "partly"
    assert "1 of 5" in judged(some)["noise"].because
    closer = judged(panel(defended=0.5))
    assert closer["noise"].verdict == "partly"
    assert "came closer" in closer["noise"].because


def test_labels_that_were_read_are_a_partial_leak() -> None:
    blind = changed(THREAT, knows=("batch_size",))
    lines = [changed(trial, threat=blind, label_accuracy=1.0) for trial in panel()]
    assert judged(lines)["noise"].verdict == "partly"
    assert "labels" in judged(lines)["noise"].because
    assert judged([changed(trial, label_accuracy=1.0) for trial in panel()])["noise"].verdict == "not-found"


def test_failed_trials_are_no_safety() -> None:
    lines = [
        changed(trial, status="failed", error="the attack needs 'labels'", scores={})
        if (trial.defense, trial.attack) == ("noise", "csdlg")
        else trial
        for trial in panel()
    ]
    found = judged(lines)["noise"]
    assert found.verdict == "cannot-conclude"
    assert "needs 'labels'" in found.because


def test_an_attacker_who_knows_the_defense_has_a_verdict_of_its_own() -> None:
    more = [made_trial("noise", "csdlg", n, ssim=[0.9], adaptive=True, threat=KNOWING) for n in range(5)]
    found = verdicts(gather([*panel(), *more], 0))
    by_threat = {each.threat: each.verdict for each in found if each.defense == "noise"}
    assert by_threat == {THREAT: "not-found", KNOWING: "leaks"}
