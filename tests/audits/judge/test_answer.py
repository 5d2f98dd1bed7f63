from __future__ import annotations

from tests.results.made import CRASHED, KNOWING, changed, in_production, made_row, made_trial, panel

from leaktight.audits.judge.answer import answer
from leaktight.audits.judge.cells import gather
from leaktight.audits.judge.verdict import Panel
from leaktight.results.schema import Answer, Tradeoff, Trial


def answered(trials: list[Trial], tradeoff: Tradeoff | None = None) -> Answer:
    cells = gather(trials)
    found = answer(Panel(cells, 0.15).verdicts(), cells, tradeoff)
    assert found is not None
    return found


def test_the_five_sentences_say_what_leaks_to_whom_how_sure_what_helps_and_what_it_costs() -> None:
    times = {"none": 1.0, "noise": 2.0}
    found = answered([changed(each, client_seconds=times[each.defense]) for each in panel()])
    assert found.leaks == "An undefended update gives away its training images: csdlg reconstructed 20 of 20 victims."
    assert found.to_whom.startswith("A server that follows the protocol")
    assert "none of 20 victims, so fewer than 14 %" in found.how_sure
    assert found.helps == "Nothing was found behind: noise."
    assert found.costs.startswith("Time of a client's round: x 2.0 with noise. Accuracy was not measured")


def test_a_defense_that_fails_to_who_knows_it_does_not_help() -> None:
    knowing = [made_trial("noise", "csdlg", n, ssim=[0.9], place=1, adaptive=True, threat=KNOWING) for n in range(5)]
    found = answered([*panel(), *knowing])
    assert found.helps == (
        "None of the defenses that were tried. "
        "Victims were reconstructed by attackers who know the defense behind: noise."
    )
    assert found.to_whom.endswith("Who also knows the defense gets through noise.")


def test_what_was_not_decided_is_not_called_help() -> None:
    found = answered(panel(trials=5))
    assert found.helps == "Not decided: noise."


def test_knowing_the_defense_is_named_only_where_it_takes_that() -> None:
    leaking = [
        changed(each, scores={"ssim": [0.9], "psnr": [30.0]}, rank={"place": 1, "decoys": 99})
        if (each.defense, each.role) == ("noise", "attack")
        else each
        for each in panel(trials=5)
    ]
    knowing = [made_trial("noise", "csdlg", n, ssim=[0.95], place=1, adaptive=True, threat=KNOWING) for n in range(5)]
    found = answered([*leaking, *knowing])
    assert found.helps == "None of the defenses that were tried. Victims were reconstructed behind: noise."
    assert "Who also knows the defense" not in found.to_whom


def test_names_of_attacks_are_spelt_as_they_are_and_one_victim_is_no_plural() -> None:
    alone = answered(panel(trials=1))
    assert alone.leaks.endswith("csdlg reconstructed 1 of 1 victim.")
    broken = answered([changed(each, **CRASHED) if each.role == "attack" else each for each in panel(trials=5)])
    assert broken.how_sure.startswith("csdlg has no valid trial")


def test_production_is_named_beside_the_upper_bound_and_not_mixed_with_it() -> None:
    found = answered([*panel(), *in_production()])
    assert found.leaks.endswith(
        "That update is easier to attack than a real one; one of real training gave nothing away to these attacks."
    )
    assert found.helps == "Nothing was found behind: noise."


def test_the_cost_of_a_trade_off_is_accuracy_and_time() -> None:
    rows = (made_row("none", 0.9, 0.9), made_row("noise", 0.3, 0.8, 3.0))
    found = answered(panel(), Tradeoff(rows=rows))
    assert found.costs == "Accuracy (without a defense 90.0 %): noise 80.0 %, time x 3.0."


def test_a_run_without_a_defense_asks_for_one() -> None:
    found = answered([each for each in panel() if each.defense == "none"])
    assert (found.helps, found.costs) == (
        "No defense was tried; name some with --defense.",
        "No defense, no cost.",
    )
