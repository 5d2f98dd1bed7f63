from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.results.made import KNOWING, changed, made_row, made_trial, panel, place_by

from leaktight.audits.judge.cells import gather
from leaktight.audits.judge.checks import CHECKS, Check, Evidence, raise_flags
from leaktight.audits.judge.tradeoff import Scored, weigh
from leaktight.audits.judge.verdict import Panel
from leaktight.results.schema import FlagPlace, Tradeoff, Trial


def good() -> list[Trial]:
    """Nothing to doubt: the attack works, the defense acts, and somebody who knows it was tried too."""
    knowing = [
        made_trial("noise", "csdlg", n, adaptive=True, threat=KNOWING, ssim=[0.3], place=place_by(0.3, n))
        for n in range(20)
    ]
    return [*panel(), *knowing]


def spoilt(where: tuple[str, str], **changes: Any) -> list[Trial]:
    return [changed(each, **changes) if (each.defense, each.attack) == where else each for each in good()]


BAD: dict[str, tuple[Callable[[], list[Trial]], str | None]] = {
    "attack-failed-undefended": (lambda: panel(leaking=0.3), None),
    "control-not-beaten": (lambda: panel(leaking=0.2, blind=0.4), None),
    "update-unchanged": (lambda: spoilt(("noise", "csdlg"), update_changed=False), None),
    "loss-did-not-fall": (lambda: spoilt(("none", "csdlg"), loss=0.995), None),
    "not-finite": (lambda: spoilt(("none", "csdlg"), loss=None), None),
    "too-few-trials": (lambda: panel(trials=2), None),
    "trials-failed": (lambda: spoilt(("noise", "csdlg"), status="failed", error="out of memory"), None),
    "no-control": (lambda: [trial for trial in good() if trial.role == "attack"], None),
    "no-adaptive-attacker": (panel, None),
    "few-decoys": (lambda: spoilt(("noise", "csdlg"), rank={"place": 3, "decoys": 9}), None),
    "grown-after-a-look": (good, None),
    "easier-than-training": (good, "1 example instead of 60"),
    "accuracy-near-chance": (good, None),
}
LOW = changed(made_row("noise", 0.3, 0.11), accuracy_ci95=(0.08, 0.15), learned=False)
UNTRAINED = weigh([LOW], [], Scored(360, 0.1))


def codes(
    trials: list[Trial], easier: str | None = None, weighed: Tradeoff | None = None, *, earlier_looks: int = 0
) -> set[str]:
    judged = Panel(gather(trials), 0.15, earlier_looks=earlier_looks)
    return {each.check.code for each in raise_flags(Evidence(judged, easier, weighed=weighed))}


def test_a_good_evaluation_raises_nothing() -> None:
    assert codes(good()) == set()
    assert codes(good(), weighed=weigh([changed(LOW, learned=True)], [], Scored(360, 0.1))) == set()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.code)
def test_each_check_is_raised_by_its_case(check: Check) -> None:
    trials, easier = BAD[check.code]
    assert check.code in codes(trials(), easier, UNTRAINED, earlier_looks=int(check.code == "grown-after-a-look"))


def test_a_flag_says_where_why_and_what_to_do() -> None:
    lines = spoilt(("noise", "csdlg"), status="failed", error="out of memory")
    flags = [each.flag for each in raise_flags(Evidence(Panel(gather(lines), 0.15)))]
    flag = next(flag for flag in flags if flag.code == "trials-failed")
    assert flag.cell == FlagPlace(attack="csdlg", defense="noise")
    assert "out of memory" in flag.detail
    assert flag.raised_if
    assert flag.advice


@pytest.mark.parametrize(
    ("first", "last", "stuck"),
    [
        (1.0, 0.995, True),
        (1.0, 0.5, False),
        (1e-12, 1e-12, False),
        (None, 1.0, False),
        (-1.0, -1.0, True),
        (-1.0, -1.5, False),
    ],
)
def test_a_loss_that_began_at_nothing_is_not_stuck(first: float | None, last: float, stuck: bool) -> None:
    lines = spoilt(("none", "csdlg"), first_loss=first, loss=last)
    assert ("loss-did-not-fall" in codes(lines)) is stuck
