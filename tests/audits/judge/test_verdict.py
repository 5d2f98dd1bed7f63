from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.results.made import CRASHED, KNOWING, THREAT, changed, in_production, made_row, made_trial, panel, place_by

from leaktight.audits.judge.cells import gather
from leaktight.audits.judge.recommend import recommend
from leaktight.audits.judge.verdict import Panel
from leaktight.results.schema import Trial, Verdict

ATTACK = ("noise", "csdlg")


def verdicts(trials: list[Trial], confidence: float = 0.15, looks: int = 1) -> list[Verdict]:
    return Panel(gather(trials), confidence, looks).verdicts()


def judged(trials: list[Trial], confidence: float = 0.15) -> dict[str, Verdict]:
    return {each.defense: each for each in verdicts(trials, confidence)}


def spoilt(trials: list[Trial], where: tuple[str, str] = ATTACK, **changes: Any) -> list[Trial]:
    return [changed(each, **changes) if (each.defense, each.attack) == where else each for each in trials]


def adapted(trials: int = 20, score: float = 0.3, **changes: Any) -> list[Trial]:
    return [
        made_trial(
            "noise", "csdlg", n, ssim=[score], adaptive=True, threat=KNOWING, place=place_by(score, n), **changes
        )
        for n in range(trials)
    ]


def test_a_defense_that_stops_a_working_attack() -> None:
    found = judged(panel())
    assert (found["none"].verdict, found["noise"].verdict) == ("reconstructed", "nothing-found")
    assert "20 of 20 victims" in found["none"].because
    assert "fewer than 14 %" in found["noise"].because
    assert found["noise"].below == pytest.approx(1 - 0.05 ** (1 / 20))
    assert (found["noise"].victims, found["noise"].advice) == (20, "")
    assert found["none"].trial_id == "none.csdlg.t019.r000"


BROKEN: dict[str, tuple[Callable[[], list[Trial]], str]] = {
    "all scores NaN": (lambda: spoilt(panel(), scores={"ssim": [None], "psnr": [None]}), "not finite"),
    "a loss that is NaN": (lambda: spoilt(panel(), loss=None), "not finite"),
    "every adaptive trial crashed": (lambda: [*panel(), *adapted(**CRASHED)], "out of memory"),
    "the loss never fell": (lambda: spoilt(panel(), loss=1.0), "did not fall"),
    "the update is unchanged": (lambda: spoilt(panel(), update_changed=False), "unchanged"),
    "one finished trial of the positive control": (
        lambda: [
            changed(each, **CRASHED) if (each.defense, each.attack) == ("none", "csdlg") and each.trial else each
            for each in panel()
        ],
        "without the defense",
    ),
    "no positive control": (
        lambda: [each for each in panel() if (each.defense, each.attack) != ("none", "csdlg")],
        "was not run",
    ),
    "too few victims": (lambda: panel(trials=18), "19 are needed"),
    "one valid trial": (
        lambda: [changed(each, **CRASHED) if each.attack == "csdlg" and each.trial else each for each in panel()],
        "",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_failure_is_never_protection(case: str) -> None:
    trials, reason = BROKEN[case]
    found = judged(trials())["noise"]
    assert found.verdict == "cannot-conclude"
    assert reason in found.because
    assert found.advice.endswith(".")
    rows = [made_row("none", 0.9, 0.9), made_row("noise", 0.1, 0.9)]
    assert recommend(rows, list(judged(trials()).values()), 0.1).defense is None


def test_a_smaller_claim_needs_fewer_victims() -> None:
    assert judged(panel(trials=6), confidence=0.45)["noise"].verdict == "nothing-found"
    assert judged(panel(trials=5), confidence=0.45)["noise"].verdict == "cannot-conclude"


def test_an_attack_that_fails_without_a_defense_proves_nothing() -> None:
    found = judged(panel(leaking=0.3, defended=0.1))
    assert {each.verdict for each in found.values()} == {"cannot-conclude"}
    assert "without the defense" in found["noise"].because


def test_a_leak_counts_even_if_the_attack_fails_without_the_defense() -> None:
    assert judged(panel(leaking=0.3, defended=0.9))["noise"].verdict == "reconstructed"


def test_one_victim_of_twenty_is_a_leak_if_it_is_exact() -> None:
    trials = [
        changed(each, scores={"ssim": [0.99], "psnr": [60.0]}, rank={"place": 1, "decoys": 99})
        if (each.defense, each.attack, each.trial) == (*ATTACK, 3)
        else each
        for each in panel()
    ]
    found = judged(trials)["noise"]
    assert found.verdict == "reconstructed"
    assert "1 of 20" in found.because
    assert found.trial_id == "noise.csdlg.t003.r000"


def test_one_close_guess_may_be_chance_and_is_neither_a_leak_nor_protection() -> None:
    trials = [
        changed(each, scores={"ssim": [0.65], "psnr": [15.0]})
        if (each.defense, each.attack, each.trial) == (*ATTACK, 3)
        else each
        for each in panel()
    ]
    assert judged(trials)["noise"].verdict == "cannot-conclude"


def test_guesses_that_pick_out_their_victims_identify_them() -> None:
    found = judged(spoilt(panel(), rank={"place": 4, "decoys": 99}))["noise"]
    assert found.verdict == "identified"
    assert "place 4 of 100" in found.because


def test_ranks_are_corrected_for_the_number_of_attacks() -> None:
    many = [
        made_trial("noise", f"attack-{k}", n, ssim=[0.3], place=place_by(0.3, n)) for k in range(30) for n in range(20)
    ]
    once = [made_trial("noise", "lucky", n, ssim=[0.3], place=20) for n in range(20)]
    assert {each.attack: each.verdict for each in judged([*panel(), *once])["noise"].attackers}["lucky"] == "identified"
    assert judged([*panel(), *once, *many])["noise"].verdict == "nothing-found"


def test_labels_count_where_an_attack_read_more_than_a_guess_would() -> None:
    blind = changed(THREAT, knows=("batch_size",))
    read = spoilt(panel(), threat=blind, label_accuracy=1.0, label_chance=0.1, blind_labels=0.1)
    assert judged(read)["noise"].verdict == "labels-read"
    assert "100 % of the labels" in judged(read)["noise"].because
    chance = spoilt(panel(), threat=blind, label_accuracy=0.84, label_chance=0.5, blind_labels=0.85)
    assert judged(chance)["noise"].verdict == "nothing-found"


def test_labels_read_by_one_attack_are_a_leak_beside_attacks_that_are_told_them() -> None:
    blind = changed(THREAT, knows=("batch_size",))
    reader = [
        made_trial(
            "noise", "dlg", n, ssim=[0.2], place=place_by(0.2, n), threat=blind, label_accuracy=1.0, label_chance=0.1
        )
        for n in range(5)
    ]
    found = judged([*panel(), *reader])["noise"]
    assert (found.verdict, found.worst_attack, found.threat) == ("labels-read", "dlg", blind)


def test_a_defense_has_one_verdict_the_worst_and_the_weaker_attackers_inside() -> None:
    found = [each for each in verdicts([*panel(), *adapted(score=0.9)]) if each.defense == "noise"]
    assert len(found) == 1
    assert (found[0].verdict, found[0].threat) == ("reconstructed", KNOWING)
    inside = [(each.adaptive, each.verdict, each.reconstructed, each.victims) for each in found[0].attackers]
    assert inside == [(True, "reconstructed", 20, 20), (False, "nothing-found", 0, 20)]


def test_several_rounds_of_one_victim_are_one_victim() -> None:
    rounds = [changed(each, id=f"{each.id}+{number}", round=number) for each in panel(trials=5) for number in range(4)]
    assert judged(rounds)["noise"].verdict == "cannot-conclude"
    same = [changed(each, examples="ab") for each in panel()]
    assert judged(same)["noise"].victims == 1


def test_tracks_are_judged_apart() -> None:
    found = {(each.track, each.defense): each for each in verdicts([*panel(), *in_production()])}
    assert found["diagnostic", "none"].verdict == "reconstructed"
    assert found["production", "none"].verdict == "nothing-found"
    assert "on diagnostic updates" in found["production", "none"].because


def test_looks_count_in_the_correction() -> None:
    lucky = [made_trial("noise", "lucky", n, ssim=[0.3], place=36) for n in range(20)]
    cells = gather([*panel(), *lucky])
    once, twice = Panel(cells, 0.15, 1), Panel(cells, 0.15, 2)
    for key, test in once.identification.items():
        assert twice.identification[key].corrected == pytest.approx(min(1.0, 2 * test.corrected))


def test_both_tracks_are_corrected_together() -> None:
    places = [5, 5, 20, 60]
    lines = [
        made_trial("none", "csdlg", n, track=track, place=place if track == "diagnostic" else 50)
        for track in ("diagnostic", "production")
        for n, place in enumerate(places)
    ]
    alone = Panel(gather([each for each in lines if each.track == "diagnostic"]), 0.15)
    both = Panel(gather(lines), 0.15)
    (key,) = alone.identification
    assert both.identification[key].corrected == pytest.approx(2 * alone.identification[key].corrected)
    assert (alone.verdicts()[0].verdict, both.verdicts()[0].verdict) == ("identified", "cannot-conclude")


def test_a_close_guess_of_an_attack_that_seldom_works_stands_against_nothing_found() -> None:
    weak = [
        made_trial(defense, "dlg", n, ssim=[0.9 if n == 0 else 0.2], place=place_by(0.2, n))
        for defense in ("none", "noise")
        for n in range(20)
    ]
    verdict = judged([*panel(), *weak])["noise"]
    assert verdict.verdict == "cannot-conclude"
    assert "dlg seems to reconstruct 1 of 20 victims" in verdict.because


def test_a_guess_without_controls_and_decoys_is_neither_a_leak_nor_protection() -> None:
    trials = [
        changed(each, scores={"ssim": [0.99], "psnr": [60.0]}, rank=None)
        if (each.defense, each.attack, each.trial) == (*ATTACK, 3)
        else each
        for each in panel()
        if (each.defense, each.attack, each.trial) != ("noise", "mean_image", 3)
    ]
    assert judged(trials)["noise"].verdict == "cannot-conclude"


def test_without_decoys_nobody_is_said_not_to_be_identified() -> None:
    exact = {"ssim": [0.99], "psnr": [60.0]}
    lines = [changed(each, rank=None) for each in spoilt(panel(), ("none", "csdlg"), scores=exact)]
    verdict = judged(lines)["noise"]
    assert verdict.verdict == "nothing-found"
    assert "reconstructed none of 20 victims" in verdict.because
    assert "identification was not tested" in verdict.because


def test_a_control_that_identifies_is_not_said_to_reconstruct() -> None:
    found = judged(spoilt(panel(leaking=0.3), ("none", "csdlg"), rank={"place": 1, "decoys": 99}))["noise"]
    assert found.verdict == "nothing-found"
    assert "without the defense it identifies 20 victims" in found.because


@pytest.mark.parametrize(("crashed", "word"), [(8, "cannot-conclude"), (7, "nothing-found")])
def test_victims_whose_trials_were_lost_may_be_those_who_leak(crashed: int, word: str) -> None:
    lines = [
        changed(each, **CRASHED) if (each.defense, each.attack) == ATTACK and each.trial < crashed else each
        for each in panel(trials=50)
    ]
    verdict = judged(lines)["noise"]
    assert verdict.verdict == word
    if word == "cannot-conclude":
        assert "8 of 50 ended in an error" in verdict.because
        assert "at most 15 % may be lost" in verdict.because


def test_trials_on_the_same_examples_are_not_answered_with_the_number_of_trials_that_were_run() -> None:
    repeated = [changed(each, examples=f"{each.trial % 10:016x}") for each in panel()]
    found = judged(repeated)["noise"]
    assert (found.verdict, found.victims) == ("cannot-conclude", 10)
    assert "found nothing on 10 victims, since some of its 20 trials attacked the same examples" in found.because
    assert found.advice.startswith("Set more --trials, attack more clients")


def test_the_evidence_is_an_example_that_was_reconstructed() -> None:
    """Not the one of the highest score, which a guess without the update reaches as well."""
    trials = [
        made
        for trial in range(6)
        for made in (
            made_trial("none", "csdlg", trial, ssim=[0.2, 0.97, 0.9], place=1),
            made_trial("none", "mean_image", trial, ssim=[0.1, 0.95, 0.3], role="control"),
        )
    ]
    found = Panel(gather(trials), 0.15).verdict("diagnostic", "none")
    assert found.verdict == "reconstructed"
    assert (found.trial_id, found.example) == (trials[0].id, 2)


def test_where_ssim_is_the_same_in_print_the_evidence_has_the_higher_psnr() -> None:
    scores = ((0.999, 30.0), (0.9985, 42.0), (0.9991, 36.0))
    trials = [
        made_trial("none", "csdlg", trial, ssim=[ssim], psnr=[psnr], place=1)
        for trial, (ssim, psnr) in enumerate(scores)
    ]
    assert Panel(gather(trials), 0.15).verdict("diagnostic", "none").trial_id == trials[1].id
