"""Claims are decided by intervals of differences: against SciPy, and at the edges."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats

from leaktight.reproductions.recipe import Claim, Place
from leaktight.reproductions.rules import decide

VICTIMS = [f"victim {number}" for number in range(12)]


def measured(values: Mapping[str, np.ndarray | list[float]]):  # type: ignore[no-untyped-def]
    def at(place: Place) -> dict[str, float]:
        return dict(zip(VICTIMS, map(float, values[place.row]), strict=False))

    return at


def claim(**settings: object) -> Claim:
    return Claim.model_validate({"says": "x", "row": "a", "column": "c", "than": [{"row": "b"}], **settings})


def test_pairs_decide_what_means_alone_would_not() -> None:
    base = np.linspace(0, 10, 12)
    values = {"a": base + 0.3 + 0.01 * np.sin(np.arange(12)), "b": base}
    found = decide(claim(), measured(values), least=10)
    assert found.decision == "holds"
    low, high = stats.ttest_rel(values["a"], values["b"]).confidence_interval()
    assert f"[{low:.3g}, {high:.3g}]" in found.because


def test_other_victims_are_compared_by_welchs_interval() -> None:
    values = {"a": np.linspace(3, 4, 12), "b": np.linspace(0, 9, 11)}
    found = decide(claim(relation="below"), measured(values), least=10)
    low, high = stats.ttest_ind(values["a"], values["b"], equal_var=False).confidence_interval()
    assert f"[{low:.3g}, {high:.3g}]" in found.because
    assert found.decision == "not testable here"
    assert found.undecided


@pytest.mark.parametrize(
    ("settings", "decision"),
    [
        ({}, "holds"),
        ({"relation": "below"}, "does not hold"),
        ({"by": 2.0}, "does not hold"),
        ({"by": 0.9}, "holds"),
        ({"times": 3.0}, "does not hold"),
        ({"relation": "near", "by": 1.2}, "holds"),
        ({"relation": "near", "by": 0.5}, "does not hold"),
        ({"than": [{"row": "b"}, {"row": "c"}]}, "holds in part"),
        ({"than": [1.5]}, "holds"),
        ({"than": [2.0]}, "not testable here"),
        ({"untestable": "no data"}, "not testable here"),
    ],
)
def test_decisions(settings: dict[str, object], decision: str) -> None:
    wave = 0.05 * np.sin(np.arange(12))
    values = {"a": 2 + wave, "b": 1 - wave, "c": 3 + wave}
    assert decide(claim(**settings), measured(values), least=10).decision == decision


def test_too_few_values_decide_nothing() -> None:
    found = decide(claim(), measured({"a": [2.0] * 9, "b": [1.0] * 9}), least=10)
    assert found.decision == "not testable here"
    assert found.because == "a place has 9 valid values; 10 are needed"
    assert not found.undecided, "nothing was compared"
    assert not decide(claim(untestable="no data"), measured({}), least=10).undecided


def test_equal_shares_of_few_victims_decide_little() -> None:
    """Ten of ten are no proof of more than 90 %: by Clopper and Pearson's limits it may be 69 %."""
    all_of_them, none = [1.0] * 10, [0.0] * 10
    values = measured({"a": all_of_them, "b": none})

    def ends(place: Place) -> tuple[float, float]:
        return 0.0, 1.0

    assert decide(claim(than=[0.9]), values, least=10, ends=ends).decision == "not testable here"
    assert decide(claim(than=[0.6]), values, least=10, ends=ends).decision == "holds"
    found = decide(claim(row="b", than=[0.1], relation="below"), values, least=10, ends=ends)
    assert found.decision == "not testable here"
    exact = stats.binomtest(0, 10).proportion_ci().high
    high = float(found.because.split("b, c: 0 [")[1].split(", ")[1].split("]")[0])
    assert high == pytest.approx(exact, abs=0.01)
    assert decide(claim(), values, least=10, ends=ends).decision == "holds"
    assert decide(claim(by=0.9), values, least=10, ends=ends).decision == "not testable here"


def test_shares_of_other_victims_are_compared_by_both_limits() -> None:
    values = measured({"a": [1.0] * 10, "b": [0.0] * 11})
    found = decide(claim(by=0.5), values, least=10, ends=lambda place: (0.0, 1.0))
    low = 1 - float(np.hypot(stats.binomtest(0, 10).proportion_ci().high, stats.binomtest(0, 11).proportion_ci().high))
    assert f"1 [{low:.2g}" in found.because
