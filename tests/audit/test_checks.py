from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.audit.scenes import THREAT, made_up, panel

from leaktight.audit.cells import gather
from leaktight.audit.checks import CHECKS, Evidence, raise_flags

Lines = list[dict[str, Any]]


def good() -> Lines:
    """Nothing to doubt: the attack works, the defense acts, and somebody who knows it was tried too."""
    knowing = {**THREAT, "knows": [*THREAT["knows"], "defense"]}
    return [*panel(), *(made_up("noise", "csdlg", n, adaptive=True, threat=knowing, ssim=[0.3]) for n in range(5))]


def changed(where: tuple[str, str], **changes: Any) -> Lines:
    return [{**line, **changes} if (line["defense"], line["attack"]) == where else line for line in good()]


BAD: dict[str, tuple[Callable[[], Lines], dict[str, str]]] = {
    "attack-failed-undefended": (lambda: panel(leaking=0.3), {}),
    "control-not-beaten": (lambda: panel(leaking=0.2, blind=0.4), {}),
    "update-unchanged": (lambda: changed(("noise", "csdlg"), update_changed=False), {}),
    "loss-did-not-fall": (lambda: changed(("none", "csdlg"), loss=0.95), {}),
    "not-finite": (lambda: changed(("none", "csdlg"), loss=None), {}),
    "too-few-trials": (lambda: panel(trials=2), {}),
    "trials-failed": (lambda: changed(("noise", "csdlg"), status="failed", error="out of memory"), {}),
    "no-control": (lambda: [line for line in good() if line["role"] == "attack"], {}),
    "no-adaptive-attacker": (panel, {}),
    "easier-than-training": (good, {"easier": "1 example instead of 60"}),
}


def codes(lines: Lines, facts: dict[str, str] | None = None) -> set[str]:
    return {flag.check.code for flag in raise_flags(Evidence(gather(lines, 0), facts or {}))}


def test_a_good_evaluation_raises_nothing() -> None:
    assert codes(good()) == set()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.code)
def test_each_check_is_raised_by_its_case(check: Any) -> None:
    lines, facts = BAD[check.code]
    assert check.code in codes(lines(), facts)


def test_a_flag_says_where_why_and_what_to_do() -> None:
    lines = changed(("noise", "csdlg"), status="failed", error="out of memory")
    flag = next(
        flag.plain() for flag in raise_flags(Evidence(gather(lines, 0), {})) if flag.check.code == "trials-failed"
    )
    assert flag["cell"] == {"attack": "csdlg", "defense": "noise"}
    assert "out of memory" in flag["detail"]
    assert flag["raised_if"]
    assert flag["advice"]


@pytest.mark.parametrize(
    ("first", "last", "stuck"), [(1.0, 0.95, True), (1.0, 0.5, False), (1e-12, 1e-12, False), (None, 1.0, False)]
)
def test_a_loss_that_began_at_nothing_is_not_stuck(first: float | None, last: float, stuck: bool) -> None:
    lines = changed(("none", "csdlg"), first_loss=first, loss=last)
    assert ("loss-did-not-fall" in codes(lines)) is stuck
