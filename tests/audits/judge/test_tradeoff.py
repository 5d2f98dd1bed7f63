from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.results.made import made_row, made_training, panel

from leaktight.audits.judge.cells import gather
from leaktight.audits.judge.tradeoff import Figures, figures_of, front, make_row, recommend
from leaktight.audits.judge.verdict import Panel

figures = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 5)).map(
    lambda each: Figures(each[0] / 4, each[1] / 4, float(each[2]))
)


def test_the_front_is_what_no_other_beats() -> None:
    rows = [
        made_row("none", 1.0, 0.9),
        made_row("good", 0.2, 0.9),
        made_row("bad", 0.2, 0.8),
        made_row("strong", 0.1, 0.7),
        made_row("?", None, 1),
    ]
    assert front(rows) == [False, True, False, True, False]


def test_times_that_differ_by_less_than_a_tenth_are_equal() -> None:
    assert front([made_row("a", 0.5, 0.9, 1.0), made_row("b", 0.5, 0.9, 1.05)]) == [True, True]
    assert front([made_row("a", 0.5, 0.9, 1.0), made_row("b", 0.5, 0.9, 1.2)]) == [True, False]


@given(st.lists(figures, min_size=1, max_size=6))
def test_there_is_always_a_front_and_nothing_beats_itself(all_figures: list[Figures]) -> None:
    rows = [made_row(str(place), *each) for place, each in enumerate(all_figures)]
    assert any(front(rows))
    assert not any(each.beats(each) for each in all_figures)


def test_a_row_takes_the_worst_trial_and_the_median_round() -> None:
    found = make_row("noise", {"noise_std": 1}, gather(panel()), made_training(0.8, [9.0, 1.0, 1.0]))
    assert found.leak.worst == pytest.approx(0.319)
    assert (found.leak.attack, found.accuracy, found.seconds_per_round, found.cost_share) == ("csdlg", 0.8, 1.0, 0.1)
    assert figures_of(make_row("noise", {}, gather(panel()), None)) is None


def test_the_recommendation_is_the_most_accurate_of_those_that_hold() -> None:
    cells = gather(panel())
    rows = [
        make_row(name, {}, cells, made_training(accuracy, [1.0])) for name, accuracy in (("none", 0.9), ("noise", 0.8))
    ]
    found = recommend(rows, Panel(cells, 0.15).verdicts())
    assert found.defense == "noise"
    assert "80.0 %" in found.because
    assert "90.0 %" in found.because


@pytest.mark.parametrize(
    ("leaking", "defended", "words"), [(0.95, 0.9, "leaks least"), (0.3, 0.1, "even without a defense")]
)
def test_nothing_is_recommended_that_was_not_shown(leaking: float, defended: float, words: str) -> None:
    cells = gather(panel(leaking, defended))
    rows = [make_row(name, {}, cells, made_training(0.9, [1.0])) for name in ("none", "noise")]
    found = recommend(rows, Panel(cells, 0.15).verdicts())
    assert found.defense is None
    assert words in found.because
