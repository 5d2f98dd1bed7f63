from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.results.made import changed, made_row, made_training, panel

from leaktight.audits.judge.answer import answer
from leaktight.audits.judge.cells import gather
from leaktight.audits.judge.checks import Evidence, raise_flags
from leaktight.audits.judge.recommend import recommend
from leaktight.audits.judge.tradeoff import Figures, Scored, figures_of, front, make_row, weigh
from leaktight.audits.judge.verdict import Panel
from leaktight.report.judgements import answer_lines
from leaktight.results.schema import Recommendation, Tradeoff, Verdict

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


SCORED = Scored(1000, 0.1)


def test_a_row_takes_the_worst_trial_and_the_median_round() -> None:
    cells = gather(panel())
    found = make_row("noise", {"noise_std": 1}, cells, made_training(0.8, [9.0, 1.0, 1.0]), SCORED)
    assert found.leak.worst == pytest.approx(0.319)
    assert (found.leak.attack, found.accuracy, found.seconds_per_round, found.cost_share) == ("csdlg", 0.8, 1.0, 0.1)
    assert found.accuracy_ci95 == pytest.approx((0.774, 0.824), abs=1e-3)
    assert found.learned
    failed = make_row("noise", {}, cells, None, SCORED)
    assert figures_of(failed) is None
    assert (failed.accuracy_ci95, failed.learned) == (None, None)


def test_a_row_compares_the_same_victims() -> None:
    found = make_row("noise", {}, gather(panel(0.95, 0.3)), None, SCORED).leak
    assert found.less is not None
    assert found.less.mean == pytest.approx(0.65)
    assert found.less.ci95 is not None
    low, high = found.less.ci95
    assert low is not None
    assert high is not None
    assert 0.2 < low < 0.65 < high < 1.1
    assert make_row("none", {}, gather(panel()), None, SCORED).leak.less is None
    alone = [trial for trial in panel() if trial.defense == "noise" or trial.trial > 100]
    assert make_row("noise", {}, gather(alone), None, SCORED).leak.less is None


def weighed(
    accuracy: Mapping[str, float],
    *,
    leaks: Mapping[str, float] | None = None,
    victims: int = 20,
    scored: Scored = SCORED,
) -> tuple[Tradeoff, list[Verdict]]:
    """A trade-off with these accuracies. leaks: SSIM behind defenses, 0.3 unless given."""
    trials = [trial for trial in panel(trials=victims) if trial.defense == "none"]
    for name in accuracy:
        if name != "none":
            own = panel(0.95, (leaks or {}).get(name, 0.3), trials=victims)
            trials += [
                changed(trial, defense=name, id=trial.id.replace("noise", name))
                for trial in own
                if trial.defense == "noise"
            ]
    cells = gather(trials)
    verdicts = Panel(cells, 0.15 if victims >= 19 else 0.45).verdicts()
    rows = [make_row(name, {}, cells, made_training(each, [1.0]), scored) for name, each in accuracy.items()]
    return weigh(rows, verdicts, scored), verdicts


def advice(*arguments: Any, **options: Any) -> Recommendation:
    found = weighed(*arguments, **options)[0].recommendation
    assert found is not None
    return found


def test_the_recommendation_is_the_most_accurate_of_those_that_hold() -> None:
    found = advice({"none": 0.9, "noise": 0.8, "clip": 0.6, "leaky": 0.89}, leaks={"leaky": 0.95})
    assert (found.defense, found.among) == ("noise", ())
    assert "of 2 defenses the most accurate one" in found.because
    assert "accuracy 80.0 % (95 % interval 77.4 to 82.4 %), accuracy 90.0 % (95 % interval" in found.because
    assert "cannot tell apart" not in found.because


def test_no_defense_is_preferred_by_an_accuracy_within_noise() -> None:
    found = advice({"none": 0.9, "noise": 0.80, "clip": 0.81, "bad": 0.5})
    assert found.defense is None
    assert found.among == ("noise", "clip")
    assert "too small to tell these accuracies apart" in found.because
    assert "bad" not in found.because
    sharp = advice({"none": 0.9, "noise": 0.80, "clip": 0.81}, scored=Scored(100_000, 0.1))
    assert (sharp.defense, sharp.among) == ("clip", ())


def test_a_loss_of_accuracy_within_noise_is_called_so() -> None:
    assert "without, which the test set cannot tell apart." in advice({"none": 0.9, "noise": 0.89}).because


@pytest.mark.parametrize(("base", "chance"), [(0.11, 0.1), (0.18, 0.1), (0.905, 0.9), (0.55, 0.5)])
def test_nothing_is_recommended_from_models_that_have_not_learned(base: float, chance: float) -> None:
    """Near chance, which is the share of the largest class, also where that is large."""
    found, verdicts = weighed({"none": base, "noise": base}, scored=Scored(1000, chance))
    assert verdicts[1].verdict == "nothing-found"
    assert found.recommendation is not None
    assert found.recommendation.defense is None
    because = found.recommendation.because
    assert "the model has not learned" in because
    assert f"always naming the largest class has {100 * chance:.1f} %" in because
    assert "--set federation.rounds=N" in because
    assert not any(row.learned for row in found.rows)


def test_few_test_examples_do_not_show_that_a_model_has_learned() -> None:
    assert advice({"none": 0.4, "noise": 0.4}, scored=Scored(10, 0.1)).defense is None
    assert advice({"none": 0.4, "noise": 0.4}, scored=Scored(1000, 0.1)).defense == "noise"


def test_a_defense_that_keeps_its_model_from_learning_is_not_recommended() -> None:
    found = advice({"none": 0.9, "noise": 0.12})
    assert found.defense is None
    assert "Nothing was found behind noise, but its model has not learned: accuracy 12.0 %" in found.because
    assert "make the defense weaker" in found.because
    assert advice({"none": 0.9, "noise": 0.12, "clip": 0.7}).defense == "clip"


def test_a_leakage_that_is_not_clearly_lower_recommends_nothing() -> None:
    """Six victims are enough for a claim of 45 %, and too few to tell 0.95 from 0.5."""
    found = advice({"none": 0.9, "noise": 0.9}, leaks={"noise": 0.5}, victims=6)
    assert found.defense is None
    assert "do not clearly leak less than undefended ones: SSIM is lower by 0.45 (95 % interval " in found.because
    assert "Set more --trials." in found.because


def test_which_defense_leaks_least_is_said_only_if_it_can_be_told() -> None:
    both = {"none": 0.9, "noise": 0.9, "clip": 0.9}
    close = advice(both, leaks={"noise": 0.9, "clip": 0.85})
    assert close.defense is None
    assert "Which of noise and clip leaks least cannot be told from so few victims." in close.because
    clear = advice(both, leaks={"noise": 0.95, "clip": 0.61}, victims=60)
    assert "None of these defenses held. clip leaks least: SSIM 0.67 at worst" in clear.because


def test_nothing_is_recommended_if_no_attack_works() -> None:
    cells = gather(panel(0.3, 0.1))
    rows = [make_row(name, {}, cells, made_training(0.9, [1.0]), SCORED) for name in ("none", "noise")]
    found = recommend(rows, Panel(cells, 0.15).verdicts(), 0.1)
    assert found.defense is None
    assert "even without a defense" in found.because


def test_accuracy_near_chance_is_a_flag() -> None:
    found, _ = weighed({"none": 0.9, "noise": 0.12})
    flags = raise_flags(Evidence(Panel(gather(panel()), 0.15), weighed=found))
    raised = [each.flag for each in flags if each.check.code == "accuracy-near-chance"]
    assert [(flag.cell, flag.detail) for flag in raised] == [
        (None, "noise 12.0 % (10.1 to 14.2 %); by chance 10.0 %, on 1000 examples")
    ]
    whole, _ = weighed({"none": 0.9, "noise": 0.8})
    codes = [each.check.code for each in raise_flags(Evidence(Panel(gather(panel()), 0.15), weighed=whole))]
    assert "accuracy-near-chance" not in codes


def test_the_answer_of_a_tradeoff_begins_with_the_recommendation() -> None:
    found, verdicts = weighed({"none": 0.9, "noise": 0.8})
    told = answer(verdicts, gather(panel()), found)
    assert told is not None
    assert answer_lines(told)[0][0] == "Recommended"
    assert answer_lines(told)[0][1].startswith("noise. It is the only one behind which these attacks found nothing")
    assert next(iter(told.document())) == "recommended"
    audit = answer(verdicts, gather(panel()), None)
    assert audit is not None
    assert answer_lines(audit)[0][0] == "What leaks"
    lost = answer(verdicts, gather(panel()), weighed({"none": 0.11, "noise": 0.1})[0])
    assert lost is not None
    assert str(lost.recommended).startswith("Nothing can be recommended from this run. Without a defense the model has")
