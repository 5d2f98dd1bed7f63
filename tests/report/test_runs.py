from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.report.made_run import MadeRun
from tests.results.made import changed, made_cell

from leaktight.core.errors import UsageError
from leaktight.report.page import build_page, headline, level_of
from leaktight.report.runs import load_run


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
    assert page.metrics == ("psnr", "ssim", "mse", "lpips_vgg")


def test_headlines_follow_the_gravest_verdict(finished_run: Path) -> None:
    run = load_run(finished_run)
    page = build_page(run)
    assert page.headline == "Without a defense, the update leaks training data."
    assert page.tally == (
        ("leaks", ("precode",)),
        ("partly", ("outpost",)),
        ("not-found", ("gaussian_noise",)),
    )
    mild = [entry.model_copy(update={"verdict": "cannot-conclude"}) for entry in run.summary.verdicts]
    unsure = run.summary.model_copy(update={"verdicts": tuple(mild)})
    changed = type(run)(**{**vars(run), "summary": unsure})
    assert headline(changed) == "Without a defense, the update cannot be judged by this run."


def test_silence_of_an_attack_that_fails_without_a_defense_is_not_called_success(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run")
    for defense in ("none", "outpost"):
        made.add(defense, "csdlg", 0, 0.95)
    page = build_page(load_run(made.finish()))
    entries = {defense: entries[0] for defense, entries in page.matrix}
    assert entries["outpost"].level == "cannot-conclude"
    assert entries["outpost"].doubtful
    assert entries["none"].level == "cannot-conclude"


def test_pictures_are_cut_from_their_strips_and_belong_to_their_scores(finished_run: Path) -> None:
    import base64
    import io

    from PIL import Image

    run = load_run(finished_run)
    group = build_page(run).gallery[0][1][0]
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
    pair = build_page(load_run(made.finish())).gallery[0][1][0].pairs[0]
    assert pair.truth is None
    assert pair.guess is None


def test_half_of_the_trials_is_where_an_attack_works() -> None:
    bare, weak = made_cell(success_rate=0.5), made_cell(success_rate=0.25)
    levels = {rate: level_of(made_cell(defense="outpost", success_rate=rate), bare) for rate in (0, 0.25, 0.5, 1)}
    assert levels == {
        0: ("not-found", False),
        0.25: ("partly", False),
        0.5: ("leaks", False),
        1: ("leaks", False),
    }
    assert level_of(made_cell(defense="outpost", success_rate=0), weak) == ("cannot-conclude", True)
    assert level_of(made_cell(defense="outpost", failed=4), bare) == ("unknown", False)
    assert level_of(made_cell(defense="outpost", success_rate=0), None) == ("cannot-conclude", False)


def test_the_evidence_of_a_verdict_is_that_of_its_trial(finished_run: Path) -> None:
    """An attacker who knows the defense can also do what others do; the strongest attack may be one of theirs."""
    run = load_run(finished_run)
    entries = [
        entry for entry in run.summary.verdicts if entry.defense == "outpost" and "defense" in entry.threat.knows
    ]
    assert len(entries) == 1
    plain = next(cell for cell in run.summary.cells if (cell.defense, cell.attack) == ("outpost", "csdlg"))
    assert not plain.adaptive
    moved = entries[0].model_copy(update={"trial_id": plain.trial_ids[0]})
    summary = run.summary.model_copy(update={"verdicts": (entries[0], moved)})
    own, taken = build_page(type(run)(**{**vars(run), "summary": summary})).cards
    assert own.bars[0].cell.adaptive
    assert own.bars[0].label == "csdlg, knows the defense: the strongest attack tried"
    assert taken.bars[0].cell == plain
    assert [bar.kind for bar in own.bars] == ["this", "positive", "negative"]
    assert own.pair is not None
    assert own.pair.trial.id == entries[0].trial_id
