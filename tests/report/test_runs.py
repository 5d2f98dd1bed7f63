from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.made_run import ANSWER, CURIOUS, MadeRun
from tests.results.made import changed, made_cell

from leaktight.core.errors import UsageError
from leaktight.report.cards import one_a_defense
from leaktight.report.matrix import level_of
from leaktight.report.page import build_page, headline
from leaktight.report.runs import load_run
from leaktight.report.words import number


def test_a_finished_run_is_read_whole(finished_run: Path) -> None:
    run = load_run(finished_run)
    assert run.finished
    assert len(run.trials) == 40
    assert run.command == "leaktight audit --trials 3 --set 'local.batch_size=2'"
    cell = run.summary.cells[0]
    assert set(cell.scores) == {"psnr", "mse", "ssim"}
    assert [trial.id for trial in run.trials_of(cell)] == list(cell.trial_ids)


def test_trials_so_far_give_the_means_that_the_summary_gives_later(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run").add_all()
    before = load_run(made.path)
    assert not before.finished
    assert before.summary.verdicts == ()
    after = load_run(made.finish())
    assert len(before.summary.cells) == len(after.summary.cells)
    for early, late in zip(before.summary.cells, after.summary.cells, strict=True):
        assert (early.defense, early.attack, early.done, early.failed) == (
            late.defense,
            late.attack,
            late.done,
            late.failed,
        )
        assert early.success_rate is None
        for metric in ("psnr", "mse", "ssim"):
            assert early.scores[metric].ci95 is None
            for statistic in ("mean", "worst"):
                found, expected = getattr(early.scores[metric], statistic), getattr(late.scores[metric], statistic)
                assert math.isclose(found, expected, rel_tol=1e-9)


def test_what_is_not_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected the folder of a run"):
        load_run(tmp_path / "missing")
    with pytest.raises(UsageError, match="is not a run"):
        load_run(tmp_path)
    (tmp_path / "config.toml").write_text("seed = 0\n")
    with pytest.raises(UsageError, match=r"no finished trial yet.*--resume"):
        load_run(tmp_path)


def test_fields_of_later_versions_do_no_harm(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run").add_all()
    content = made.content()
    content["more"] = {"a": 1}
    content["cells"][0]["lpips_vgg"] = {"mean": 0.25, "ci95": None, "worst": 0.2, "median": 0.3}
    (made.path / "summary.json").write_text(json.dumps(content))
    page = build_page(load_run(made.path))
    assert page.parts[0].metrics == ("psnr", "ssim", "mse", "lpips_vgg")


def test_headlines_follow_the_answer_or_the_gravest_verdict(finished_run: Path) -> None:
    run = load_run(finished_run)
    page = build_page(run)
    assert page.headline == ANSWER.leaks
    assert page.tone == "reconstructed"
    assert page.parts[0].tally == (
        ("reconstructed", ("none", "precode")),
        ("identified", ("outpost",)),
        ("nothing-found", ("gaussian_noise",)),
    )
    silent = run.summary.model_copy(update={"answer": None})
    assert headline(replace(run, summary=silent)) == "Without a defense, the update leaks training data."
    mild = [entry.model_copy(update={"verdict": "cannot-conclude"}) for entry in run.summary.verdicts]
    unsure = silent.model_copy(update={"verdicts": tuple(mild)})
    assert headline(replace(run, summary=unsure)) == "Without a defense, the update cannot be judged by this run."


def test_the_matrix_says_what_the_verdicts_say_about_each_attack(finished_run: Path) -> None:
    (part,) = build_page(load_run(finished_run)).parts
    rows = {defense: {entry.column.attack: entry for entry in entries[:2]} for defense, entries in part.matrix}
    assert rows["gaussian_noise"]["inverting_gradients"].level == "cannot-conclude"
    assert rows["gaussian_noise"]["csdlg"].level == "nothing-found"
    assert rows["outpost"]["csdlg"].level == "identified"
    assert rows["none"]["csdlg"].among == 100
    assert part.levels == ("reconstructed", "identified", "cannot-conclude", "nothing-found", "control")


def test_tracks_are_never_mixed(both_tracks: Path) -> None:
    run = load_run(both_tracks)
    diagnostic, production = build_page(run).parts
    assert (diagnostic.track, production.track) == ("diagnostic", "production")
    for part in (diagnostic, production):
        cells = [entry.cell for _, entries in part.matrix for entry in entries if entry.cell]
        assert {cell.track for cell in cells} == {part.track}
        assert {card.verdict.track for card in part.cards} == {part.track}
        pairs = [pair for _, groups in part.gallery for group in groups for pair in group.pairs]
        assert {pair.trial.track for pair in pairs} == {part.track}
    assert "1" in {value for key, _, value in diagnostic.ledger if key == "local_steps"}
    assert "20" in {value for key, _, value in production.ledger if key == "local_steps"}
    alone = run.summary.model_copy(
        update={
            "cells": tuple(cell for cell in run.summary.cells if cell.track == "diagnostic"),
            "verdicts": tuple(entry for entry in run.summary.verdicts if entry.track == "diagnostic"),
        }
    )
    (part,) = build_page(replace(run, summary=alone)).parts
    assert (part.note, part.suffix) == ("", "")


def test_trials_so_far_keep_their_tracks_apart(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run")
    made.add("none", "csdlg", 0, 0.1)
    made.add("none", "csdlg", 1, 0.9, track="production")
    cells = load_run(made.path).summary.cells
    assert [(cell.track, cell.trials) for cell in cells] == [("diagnostic", 1), ("production", 1)]


def test_silence_of_an_attack_that_fails_without_a_defense_is_not_called_success(tmp_path: Path) -> None:
    """In files without a verdict on each attack."""
    made = MadeRun(tmp_path / "run")
    for defense in ("none", "outpost"):
        made.add(defense, "csdlg", 0, 0.95)
    content = made.content() | {"schema_version": 1}
    for entry in content["verdicts"]:
        del entry["attackers"]
    (made.path / "summary.json").write_text(json.dumps(content))
    (part,) = build_page(load_run(made.path)).parts
    entries = {defense: entries[0] for defense, entries in part.matrix}
    assert entries["outpost"].level == "cannot-conclude"
    assert entries["outpost"].doubtful
    assert entries["none"].level == "cannot-conclude"


def test_pictures_are_cut_from_their_strips_and_belong_to_their_scores(finished_run: Path) -> None:
    import base64
    import io

    from PIL import Image

    run = load_run(finished_run)
    group = build_page(run).parts[0].gallery[0][1][0]
    scores = [dict(pair.scores)["PSNR"] for pair in group.pairs]
    assert scores == sorted(scores, key=lambda text: -float(text.split()[0]))
    for pair in group.pairs:
        decoded = []
        for source in (pair.truth, pair.guess):
            assert source is not None
            data = base64.b64decode(source.removeprefix("data:image/png;base64,"))
            decoded.append(np.asarray(Image.open(io.BytesIO(data)), dtype=float) / 255)
        assert decoded[0].shape == (32, 32, 3)
        psnr = -10 * math.log10(float(np.mean((decoded[0] - decoded[1]) ** 2)))
        assert dict(pair.scores)["PSNR"] == f"{psnr:.1f} dB"


def test_a_picture_outside_the_run_or_damaged_is_left_out(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run")
    made.add("none", "csdlg", 0, 0.1)
    (trial,) = made.trials
    assert trial.images is not None
    assert trial.images.truth is not None
    (tmp_path / "secret.png").write_bytes((made.path / trial.images.truth).read_bytes())
    (made.path / trial.images.guess).write_bytes(b"no picture")
    made.trials = [changed(trial, images=trial.images.model_copy(update={"truth": "../secret.png"}))]
    made.write()
    pair = build_page(load_run(made.finish())).parts[0].gallery[0][1][0].pairs[0]
    assert pair.truth is None
    assert pair.guess is None


def test_half_of_the_trials_is_where_an_attack_works() -> None:
    bare, weak = made_cell(success_rate=0.5), made_cell(success_rate=0.25)
    levels = {rate: level_of(made_cell(defense="outpost", success_rate=rate), bare) for rate in (0, 0.25, 0.5, 1)}
    assert levels == {
        0: ("nothing-found", False),
        0.25: ("identified", False),
        0.5: ("reconstructed", False),
        1: ("reconstructed", False),
    }
    assert level_of(made_cell(defense="outpost", success_rate=0), weak) == ("cannot-conclude", True)
    assert level_of(made_cell(defense="outpost", failed=4), bare) == ("unknown", False)
    assert level_of(made_cell(defense="outpost", success_rate=0), None) == ("cannot-conclude", False)


def test_a_card_speaks_of_one_victim(finished_run: Path) -> None:
    run = load_run(finished_run)
    (part,) = build_page(run).parts
    trials = {trial.id: trial for trial in run.trials}
    assert [card.verdict.defense for card in part.cards] == ["none", "gaussian_noise", "outpost", "precode"]
    for card in part.cards:
        assert card.evidence is not None
        trial = trials[card.verdict.trial_id or ""]
        assert f"trial {trial.trial}, image" in card.evidence.title
        kinds = [view.kind for view in card.evidence.views]
        assert kinds == (["this", "negative"] if trial.defense == "none" else ["this", "positive", "negative"])
        index = int(card.evidence.title.split("image ")[1].split()[0]) - 1
        bare = next(each for each in run.trials if each.id == f"none-{trial.attack}-{trial.trial}")
        blind = next(each for each in run.trials if each.id == f"{trial.defense}-prior_only-{trial.trial}")
        shown = {view.kind: dict(view.scores)["SSIM"] for view in card.evidence.views}
        for kind, other in {"this": trial, "positive": bare, "negative": blind}.items():
            if kind in shown:
                assert shown[kind] == number((other.scores["ssim"] or ())[index], "ssim")
    adaptive = part.cards[2].evidence
    assert adaptive is not None
    assert adaptive.views[0].label == "csdlg, knows the defense"


def test_verdicts_on_each_attacker_of_an_old_file_become_one(finished_run: Path) -> None:
    run = load_run(finished_run)
    lead = next(entry for entry in run.summary.verdicts if entry.defense == "outpost")
    mild = changed(lead, verdict="nothing-found", threat=CURIOUS, because="it found nothing.", attackers=())
    old = run.summary.model_copy(update={"verdicts": (mild, changed(lead, attackers=())), "schema_version": 1})
    (joined,) = one_a_defense(old)
    assert joined.verdict == "identified"
    assert [each.verdict for each in joined.attackers] == ["identified", "nothing-found"]
    assert [each.adaptive for each in joined.attackers] == [True, False]
    assert joined.attackers[1].attack == "csdlg and inverting_gradients"
    assert (joined.attackers[1].reconstructed, joined.attackers[1].victims) == (1, 3)
