from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tests.report.made_run import ANSWER, NOISE, MadeRun
from tests.report.reading import Page
from tests.results.made import changed

from leaktight.report.html import render_comparison, write_report
from leaktight.report.judgements import answer_lines
from leaktight.report.runs import load_run


@pytest.fixture(scope="module")
def page(finished_run: Path) -> Page:
    return Page(write_report(finished_run).read_text())


def test_the_markup_is_sound(page: Page) -> None:
    assert page.faults == []
    assert len(page.ids) == len(set(page.ids))
    levels = [int(tag[1]) for tag, _ in page.elements if tag in {"h1", "h2", "h3", "h4"}]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_nothing_is_fetched_from_anywhere(page: Page) -> None:
    sources = [attributes["src"] for attributes in page.all("img")]
    assert sources
    assert all(source and source.startswith("data:image/png;base64,") for source in sources)
    assert page.all("link") == []
    assert all("src" not in attributes for attributes in page.all("script"))
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline'; script" in policy
    assert "script-src 'sha256-" in policy


def test_every_link_leads_somewhere(page: Page) -> None:
    targets = [attributes["href"] for attributes in page.all("a")]
    assert len(targets) > 50
    assert {target for target in targets if not (target and target[0] == "#" and target[1:] in page.ids)} == set()


def test_the_top_answers_in_five_sentences(page: Page) -> None:
    assert page.text("h1") == ANSWER.leaks
    top = page.text("header")
    found = [top.index(f"{question} {sentence.replace('`', '')}") for question, sentence in answer_lines(ANSWER)]
    assert found == sorted(found)
    assert "earlier version" not in top


def test_only_the_first_sentence_of_what_leaks_is_the_headline(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run").add_all()
    content = made.content()
    content["answer"]["leaks"] = "Images leak at 0.9 SSIM. Real training leaks less. Or not."
    (made.path / "summary.json").write_text(json.dumps(content))
    page = Page(write_report(made.path).read_text())
    assert page.text("h1") == "Images leak at 0.9 SSIM."
    assert "What leaks Images leak at 0.9 SSIM. Real training leaks less. Or not. To whom" in page.text("header")


def test_an_older_file_has_its_own_words_and_says_whose_rules_they_are(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run").add_all()
    content = made.content() | {"schema_version": 1}
    for name in ("answer", "spending", "confidence", "digest"):
        del content[name]
    for entry in content["verdicts"]:
        del entry["attackers"], entry["victims"], entry["below"]
        old = {"reconstructed": "leaks", "identified": "partly", "nothing-found": "not-found"}
        entry["verdict"] = old[entry["verdict"]]
    for cell in content["cells"]:
        for name in ("valid", "victims", "faults", "reconstructed", "identification", "label_reading"):
            cell.pop(name, None)
    (made.path / "summary.json").write_text(json.dumps(content))
    page = Page(write_report(made.path).read_text())
    assert page.faults == []
    assert page.text("h1") == "Without a defense, the update leaks training data."
    top = page.text("header")
    assert "Judged by the rules of an earlier version." in top
    assert "Leaks in part outpost" in " ".join(top.split())
    assert "No leak found by these attacks" in page.text("verdicts")
    assert "3 of 3 trials leaked" in page.text("matrix")
    assert "Effort" not in page.text("assumptions")


def test_a_card_has_the_reason_the_claim_and_the_weaker_attackers(page: Page, finished_run: Path) -> None:
    verdicts = page.text("verdicts")
    for entry in json.loads((finished_run / "summary.json").read_text())["verdicts"]:
        assert entry["because"] in verdicts
        for attacker in entry["attackers"]:
            assert attacker["because"] in verdicts
            assert f"{attacker['reconstructed']} of {attacker['victims']} victims" in verdicts
    assert "With 95 % confidence, fewer than 63 % of victims are reconstructed. Rests on 3 victims." in verdicts
    assert "not a proof that nothing leaks" in verdicts
    assert "positive control" in verdicts
    assert "negative control" in verdicts
    assert verdicts.count("One victim and its controls") == 4


def test_what_to_do_is_said_where_nothing_can_be_concluded(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run").add_all()
    content = made.content()
    content["verdicts"][1] |= {"verdict": "cannot-conclude", "advice": "Set --trials 19."}
    (made.path / "summary.json").write_text(json.dumps(content))
    assert "What to do: Set --trials 19." in Page(write_report(made.path).read_text()).text("verdicts")


def test_the_matrix_holds_the_numbers_of_the_summary(page: Page, finished_run: Path) -> None:
    matrix, numbers = page.text("matrix"), page.text("numbers")
    for cell in json.loads((finished_run / "summary.json").read_text())["cells"]:
        if cell["role"] == "attack":
            assert f"{cell['reconstructed']} of {cell['victims']} reconstructed" in matrix
        assert f"{cell['psnr']['mean']:.1f} dB worst {cell['psnr']['worst']:.1f}" in matrix
        low, high = cell["psnr"]["ci95"]
        assert f"{cell['psnr']['mean']:.1f} dB ({low:.1f} to {high:.1f})" in numbers
    for defense in NOISE:
        assert (defense if defense != "none" else "no defense") in matrix
    assert "not run" in matrix
    assert "below. Negative controls" in matrix
    assert "not leaks. Numbers are means" in matrix
    assert "Picked out of 100; by chance < 0.1 %" in matrix
    assert "Not picked out of 100; by chance 64 %" in matrix
    assert "0 of 2 reconstructed" in matrix
    assert "1 invalid: its own loss did not fall" in matrix
    assert "1 invalid: ended in an error" in matrix


def test_two_tracks_stand_apart_and_say_what_they_are(both_tracks: Path, page: Page) -> None:
    whole = Page(write_report(both_tracks).read_text())
    assert whole.faults == []
    assert len(whole.ids) == len(set(whole.ids))
    sections = {
        "verdicts": "agic reconstructed",
        "matrix": "Labels read; by chance",
        "images": "agic",
        "numbers": "agic",
    }
    for name, words in sections.items():
        assert words in whole.text(f"{name}-production")
        assert words not in whole.text(name)
        assert f"{name}-production" not in page.ids
    assert "An upper bound: updates that are easier to attack than those of training." in whole.text("verdicts")
    assert "Updates as in training" in whole.text("verdicts-production")
    assert "Ledger, production" in whole.text("assumptions")
    for word in ("Diagnostic", "diagnostic", "upper bound", "roduction"):
        assert word not in page.text("body")
    targets = [attributes["href"] or "" for attributes in whole.all("a")]
    assert {target for target in targets if target[1:] not in whole.ids} == set()


def test_the_facts_say_what_was_spent(page: Page) -> None:
    assumed = page.text("assumptions")
    assert "Trials 40 of at most 120" in assumed
    assert "Time 3 min 24 s" in assumed
    assert "the rule asks for no more trials" in assumed
    assert "fewer than 15 % of victims" in assumed


def test_assumptions_flags_failures_and_the_way_to_reproduce_are_there(page: Page) -> None:
    assumed = page.text("assumptions")
    assert "Labels given to the attacker" in assumed
    assert "Attacker knows the defense varies: no and yes" in assumed
    flags = page.text("flags")
    assert "fewer than 10 trials were run" in flags
    assert "Run again with --trials 10 or more." in flags
    assert "inverting_gradients on precode: 1 of 4" in flags
    assert "the update holds values that are not finite" in flags
    how = page.text("reproduce")
    assert "leaktight audit --trials 3 --set 'local.batch_size=2'" in how
    assert 'kind = "faces"' in how
    assert "2.13.0" in how


def test_figures_have_names_and_a_table_beside(page: Page) -> None:
    plots = [attributes for attributes in page.all("svg") if attributes.get("class") == "plot"]
    assert len(plots) == 5  # the trade-off for wide and for narrow windows, three panels over time
    for attributes in plots:
        assert attributes.get("role") in {"img", "group"}
        names = (attributes.get("aria-labelledby") or "").split()
        assert len(names) == 2
        assert all(page.text(name) for name in names)
    assert "93.1 %" in page.text("tradeoff")
    assert "Recommended here: outpost" in page.text("tradeoff")
    assert "no defense csdlg 10 28.0 dB (26.0 to 30.0)" in page.text("time")


HOSTILE = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>"


def test_names_from_the_data_stay_text(tmp_path: Path) -> None:
    rename = {"outpost": HOSTILE, "csdlg": HOSTILE}
    made = MadeRun(tmp_path / "run", client=HOSTILE, rename=rename).add_all()
    content = made.content(over_time=True)
    content["scenario"]["data"] = HOSTILE
    content["verdicts"][0]["because"] = HOSTILE
    content["verdicts"][1]["attackers"][0]["because"] = HOSTILE
    content["answer"] = dict.fromkeys(content["answer"], HOSTILE)
    content["flags"][0] |= {"detail": HOSTILE, "code": HOSTILE, "advice": HOSTILE}
    content["over_time"][0]["defense"] = HOSTILE
    content["tradeoff"] = {"rows": [{"defense": HOSTILE, "leak": {"worst": 0.5}, "accuracy": 0.5}]}
    (made.path / "summary.json").write_text(json.dumps(content))
    (made.path / "config.toml").write_text(f"# {HOSTILE}")
    (made.path / "command.txt").write_text(HOSTILE)
    page = Page(write_report(made.path).read_text())
    assert page.faults == []
    assert len(page.all("script")) == 1
    assert all(attributes["src"] != "x" for attributes in page.all("img"))
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert HOSTILE in page.text("verdicts")
    assert HOSTILE in page.text("reproduce")


def test_an_unfinished_run_says_so_and_shows_what_there_is(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run")
    made.add("none", "csdlg", 0, 0.02)
    page = Page(write_report(made.path).read_text())
    assert page.text("h1") == "Not finished: 1 trial so far, and no verdict yet."
    assert "This run is not finished." in page.text("header")
    assert "verdicts" not in page.ids
    assert f"{made.trials[0].score('psnr'):.1f} dB" in page.text("matrix")
    assert "reconstructed" not in page.text("matrix")
    assert len(page.all("figure")) == 2


def test_values_that_are_not_numbers_do_not_break_the_page(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run").add_all()
    content = made.content(tradeoff=True, over_time=True)
    content["cells"][0]["psnr"] = {"mean": float("nan"), "ci95": None, "worst": float("inf")}
    content["cells"][1]["ssim"] = None
    content["cells"][2]["success_rate"] = None
    content["tradeoff"]["rows"][0]["accuracy"] = float("nan")
    content["over_time"][0]["psnr"] = {"mean": float("nan"), "ci95": [None, None]}
    (made.path / "summary.json").write_text(json.dumps(content))
    page = Page(write_report(made.path).read_text())
    assert page.faults == []
    assert "PSNR – worst –" in page.text("matrix")


def test_runs_side_by_side(finished_run: Path, other_run: Path, tmp_path: Path) -> None:
    write_report(finished_run)
    page = Page(render_comparison([load_run(finished_run), load_run(other_run)], tmp_path))
    assert page.faults == []
    assert page.text("h1") == "2 runs side by side"
    links = [attributes["href"] for attributes in page.all("a") if (attributes["href"] or "#")[0] != "#"]
    assert len(links) == 1
    assert links[0] is not None
    assert (tmp_path / links[0]).resolve() == (finished_run / "report.html").resolve()


def test_training_that_failed_is_named(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run")
    made.add("none", "csdlg", 0, 0.1)
    content = made.content() | {"training_failed": {"outpost": "round 3 diverged"}}
    (made.path / "summary.json").write_text(json.dumps(content))
    assert "outpost round 3 diverged" in Page(write_report(made.path).read_text()).text("flags")


def test_a_captured_update_without_originals_shows_what_was_found_and_scores_nothing(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", rename={"none": "captured"})
    made.add("none", "csdlg", 0, 0.1)
    content = made.content() | {"truth_given": False}
    cell = content["cells"][0] | {"psnr": None, "ssim": None, "mse": None, "success_rate": None, "control": {}}
    content["cells"] = [cell | {"first_loss": 1.5, "loss": 0.02}]
    content["verdicts"][0] |= {"verdict": "cannot-conclude", "because": "look at the pictures."}
    del content["answer"]
    (made.path / "summary.json").write_text(json.dumps(content))
    (trial,) = made.trials
    assert trial.images is not None
    made.trials = [changed(trial, scores={}, images=trial.images.model_copy(update={"truth": None}))]
    made.write()
    page = Page(write_report(made.path).read_text())
    assert page.faults == []
    assert page.text("h1") == "The update cannot be judged by this run."
    assert "loss 0.02, began at 1.5" in page.text("matrix")
    assert "positive control" not in page.text("matrix")
    assert page.text("images").startswith("Reconstructions The originals were not given")
    assert [attributes["alt"] for attributes in page.all("img")] == [
        f"Reconstruction{by}: client-003, round 0, trial 0, image {index} of 2"
        for by, index in ((" by csdlg", 1), ("", 1), ("", 2))
    ]
    assert "PSNR" not in page.text("main")


def test_what_an_ensemble_chose_is_apart_from_what_the_truth_would_choose(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run").add_all()
    assert "Ensembles" not in Page(write_report(made.path).read_text()).text("numbers")
    content = made.content()
    content["cells"][0] |= {"chosen": {"dlg": 4, HOSTILE: 1}, "oracle": {"psnr": 98.7}}
    (made.path / "summary.json").write_text(json.dumps(content))
    page = Page(write_report(made.path).read_text())
    assert page.faults == []
    assert f"dlg 4, {HOSTILE} 1" in page.text("numbers")
    assert "98.7 dB" in page.text("numbers").split("if the truth had chosen")[1]


def test_a_tradeoff_leads_with_its_recommendation(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run").add_all()
    content = made.content(tradeoff=True)
    content["answer"] = {
        "recommended": "Nothing can be recommended from this run. The model has not learned."
    } | content["answer"]
    content["tradeoff"] |= {"chance": 0.1, "examples": 360, "recommendation": {"because": "The model has not learned."}}
    content["tradeoff"]["rows"][1] |= {"accuracy": 0.11, "accuracy_ci95": [0.08, 0.15], "learned": False}
    (made.path / "summary.json").write_text(json.dumps(content))
    page = Page(write_report(made.path).read_text())
    assert page.faults == []
    assert page.text("h1") == "Nothing can be recommended from this run."
    top = page.text("header")
    assert top.index("The model has not learned.") < top.index("What leaks")
    cost = page.text("tradeoff")
    assert "Nothing can be recommended from this run. The model has not learned." in cost
    assert "11.0 % (8.0 to 15.0 %) near chance" in cost
    assert "always naming the largest class has 10.0 %" in cost
