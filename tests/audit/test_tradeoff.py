from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.audit.scenes import panel

from leaktight.audit.cells import gather
from leaktight.audit.tradeoff import Figures, Row, front, make_row, recommend
from leaktight.audit.verdict import verdicts

figures = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 5)).map(
    lambda each: Figures(each[0] / 4, each[1] / 4, float(each[2]))
)


def row(name: str, leak: float | None, accuracy: float | None, seconds: float | None = 1.0) -> Row:
    return Row(name, {}, leak, leak, 20.0, "csdlg", accuracy, seconds, 0.0)


def training(accuracy: float, seconds: list[float]) -> dict[str, Any]:
    return {
        "rounds": [{"seconds": each} for each in seconds],
        "final": {"accuracy": accuracy},
        "defense": {"share_of_time": 0.1},
    }


def test_the_front_is_what_no_other_beats() -> None:
    rows = [
        row("none", 1.0, 0.9),
        row("good", 0.2, 0.9),
        row("bad", 0.2, 0.8),
        row("strong", 0.1, 0.7),
        row("?", None, 1),
    ]
    assert front(rows) == [False, True, False, True, False]


def test_times_that_differ_by_less_than_a_tenth_are_equal() -> None:
    assert front([row("a", 0.5, 0.9, 1.0), row("b", 0.5, 0.9, 1.05)]) == [True, True]
    assert front([row("a", 0.5, 0.9, 1.0), row("b", 0.5, 0.9, 1.2)]) == [True, False]


@given(st.lists(figures, min_size=1, max_size=6))
def test_there_is_always_a_front_and_nothing_beats_itself(all_figures: list[Figures]) -> None:
    rows = [row(str(place), *each) for place, each in enumerate(all_figures)]
    assert any(front(rows))
    assert not any(each.beats(each) for each in all_figures)


def test_a_row_takes_the_worst_trial_and_the_median_round() -> None:
    found = make_row("noise", {"noise_std": 1}, gather(panel(), 0), training(0.8, [9.0, 1.0, 1.0]))
    assert found.leak == pytest.approx(0.304)
    assert (found.attack, found.accuracy, found.seconds, found.cost_share) == ("csdlg", 0.8, 1.0, 0.1)
    assert make_row("noise", {}, gather(panel(), 0), None).figures is None


def test_the_recommendation_is_the_most_accurate_of_those_that_hold() -> None:
    cells = gather(panel(), 0)
    rows = [make_row(name, {}, cells, training(accuracy, [1.0])) for name, accuracy in (("none", 0.9), ("noise", 0.8))]
    found = recommend(rows, verdicts(cells))
    assert found["defense"] == "noise"
    assert "80.0 %" in found["because"]
    assert "90.0 %" in found["because"]


@pytest.mark.parametrize(
    ("leaking", "defended", "words"), [(0.95, 0.9, "leaks least"), (0.3, 0.1, "even without a defense")]
)
def test_nothing_is_recommended_that_was_not_shown(leaking: float, defended: float, words: str) -> None:
    cells = gather(panel(leaking, defended), 0)
    rows = [make_row(name, {}, cells, training(0.9, [1.0])) for name in ("none", "noise")]
    found = recommend(rows, verdicts(cells))
    assert found["defense"] is None
    assert words in found["because"]
