"""A recipe is run once: interrupted runs go on, equal runs are shared, and pages follow from results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import filelock
import numpy as np
import pytest

from leaktight.audits.run import Watcher
from leaktight.config import recipes
from leaktight.reproductions import file
from leaktight.reproductions import recipe as module
from leaktight.reproductions.docs import collect, pages, write_pages
from leaktight.reproductions.figure import _lines
from leaktight.reproductions.recipe import read_recipe
from leaktight.reproductions.reproduce import reproduce
from leaktight.reproductions.run import Reproduced
from leaktight.results.schema import Round, Trial

CONFIG = """
[data]
kind = "digits"
[partition]
kind = "iid"
clients = 10
[model]
kind = "logistic_regression"
[local]
samples = 1
steps = 1
batch_size = 1
[federation]
rounds = 2
per_round = 2
[threat]
knows = ["batch_size", "labels", "local_training"]
[audit]
trials = 3
metrics = ["psnr", "ssim"]
[[attack]]
kind = "linear_inversion"
[[defense]]
kind = "noise"
noise_std = 1.0
"""
LEAKS = """
[recipe]
paper = "outpost"
where = "Table 9"
title = "one image"
least = 3
figure = "pictures"
[recipe.rows]
"no defense" = {defense = "none"}
"noise" = {defense = "noise"}
[recipe.columns]
"PSNR" = {attack = "linear_inversion", metric = "psnr"}
"rebuilt" = {attack = {kind = "linear_inversion"}, metric = "reconstructed"}
"share" = {attack = "linear_inversion", metric = "psnr", percent_of = "no defense"}
"best SSIM" = {attack = "linear_inversion", metric = "best_ssim"}
[recipe.scales.cpu]
minutes = 0.1
differences = ["digits"]
[[recipe.claims]]
says = "noise hides the image"
row = "noise"
column = "PSNR"
than = [{row = "no defense"}]
relation = "below"
by = 20.0
"""
LEARNS = """
[recipe]
paper = "lrp"
where = "Table 2"
title = "accuracy"
least = 2
figure = "curves"
[[recipe.parts]]
name = "plain"
command = "train"
seeds = 2
set = ["defense.kind=none"]
[[recipe.parts]]
name = "noisy"
command = "train"
seeds = 2
[[recipe.parts]]
name = "sizes"
command = "tests.reproductions.test_run:sizes"
set = ["width=3"]
[recipe.rows]
"plain" = {part = "plain"}
"noisy" = {part = "noisy"}
[recipe.columns]
"accuracy" = {metric = "accuracy"}
[recipe.scales.cpu]
minutes = 0.1
[[recipe.claims]]
says = "noise costs nothing"
row = "noisy"
column = "accuracy"
than = [{row = "plain"}]
relation = "near"
by = 200.0
"""


def sizes(settings: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    return {"plain": {"accuracy": {"width": float(settings[0].partition("=")[2])}}}


class Counting(Watcher):
    def __init__(self, stop_after: int | None = None) -> None:
        self.trials = self.rounds = 0
        self.stop_after = stop_after

    def trial_done(self, trial: Trial) -> None:
        self.trials += 1
        if self.trials == self.stop_after:
            raise KeyboardInterrupt

    def round_done(self, name: str, row: Round) -> None:
        self.rounds += 1


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Reproduced]:
    files = {name: tmp_path / f"{name}.toml" for name in ("leaks", "again", "learns")}
    for name, text in {"leaks": LEAKS, "again": LEAKS, "learns": LEARNS}.items():
        files[name].write_text(CONFIG + text)
    (tmp_path / "leaks.csv").write_text("row,PSNR\nno defense,31.5\n")
    for place in (recipes, module, file):
        monkeypatch.setattr(place, "recipes", lambda: files)
    return lambda name: Reproduced(read_recipe(name), "cpu", tmp_path / "out")


def test_an_interrupted_recipe_goes_on_and_an_equal_run_is_shared(made: Callable[[str], Reproduced]) -> None:
    first = Counting(stop_after=4)
    with pytest.raises(KeyboardInterrupt):
        reproduce(made("leaks"), watcher=first)
    assert not made("leaks").jobs[0].done
    second = Counting()
    result = reproduce(made("leaks"), watcher=second)
    assert result is not None
    job = made("leaks").jobs[0]
    assert first.trials + second.trials == len(job.planned.experiment.by_id)  # type: ignore[union-attr]
    shared = Counting()
    again = reproduce(made("again"), watcher=shared)
    assert shared.trials == 0
    assert again is not None
    assert again.runs == result.runs
    assert (made("leaks").folder / "figure.png").read_bytes()[1:4] == b"PNG"


def test_a_run_at_which_another_process_works_is_done_once(made: Callable[[str], Reproduced]) -> None:
    """Two processes have recipes with the same run; the second waits, and finds it done."""
    job, counting = made("leaks").jobs[0], Counting()
    job.path.mkdir(parents=True)
    with filelock.FileLock(job.path.with_suffix(".lock")):
        assert not job.run(workers=0, watcher=counting, wait=False)
        second = threading.Thread(target=reproduce, args=(made("again"),), kwargs={"watcher": counting})
        second.start()
        second.join(0.5)
        assert second.is_alive()
        job._timed(0, Watcher())
    second.join()
    assert counting.trials == 0
    assert (made("again").folder / "result.json").exists()


def test_published_and_measured_stand_side_by_side(made: Callable[[str], Reproduced]) -> None:
    result = reproduce(made("leaks"))
    assert result is not None
    found = {(each.row, each.column): each for each in result.entries}
    assert found["no defense", "PSNR"].published == "31.5"
    assert (found["no defense", "PSNR"].mean or 0) > 60
    assert found["no defense", "rebuilt"].mean == 1.0
    assert found["noise", "PSNR"].number == 3
    assert found["no defense", "share"].mean == 100.0
    assert 0 < (found["noise", "share"].mean or 0) < 50
    assert (found["no defense", "best SSIM"].mean or 0) > 0.99
    assert result.claims[0].decision == "holds", result.claims[0].because
    assert result.claims[0].rule == "noise, PSNR is below that of no defense, PSNR by more than 20"
    page = (made("leaks").folder / "page.md").read_text()
    assert "| PSNR | 31.5 / " in page  # the shorter side is across
    assert "- digits" in page


def test_shards_do_each_run_once_and_the_last_writes_the_result(made: Callable[[str], Reproduced]) -> None:
    assert reproduce(made("learns"), shard=(1, 2)) is None
    counting = Counting()
    result = reproduce(made("learns"), shard=(2, 2), watcher=counting)
    assert result is not None
    assert counting.rounds == 2 * 2
    assert result.kind == "victims" or result.kind == "seeds"
    assert [run.seed for run in result.runs] == [0, 1, 0, 1, None]
    assert result.claims[0].decision == "holds"


def test_lines_are_drawn_over_columns_that_are_numbers(made: Callable[[str], Reproduced]) -> None:
    """The columns "1" and "50" are places on the axis; one with a word is not."""
    recipe = read_recipe("leaks")
    columns = {"1": recipe.columns["PSNR"], "50": recipe.columns["PSNR"], "rebuilt": recipe.columns["rebuilt"]}
    lined = replace(
        made("leaks"), recipe=recipe.model_copy(update={"figure": "lines", "columns": columns, "claims": ()})
    )
    reproduce(lined)
    assert (lined.folder / "figure.png").read_bytes()[1:4] == b"PNG"
    assert [np.size(line.get_xdata()) for line in _lines(lined).axes[0].lines] == [2, 2]


def test_pages_are_made_from_results_alone(made: Callable[[str], Reproduced], tmp_path: Path) -> None:
    reproduce(made("leaks"))
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Results\n\n<!-- claims -->\nbefore\n<!-- end of claims -->\n\nRest.\n")
    assert collect(tmp_path / "out", docs, "cpu") == ["leaks"]
    write_pages(docs)
    index = (docs / "index.md").read_text()
    assert "noise hides the image | **holds**" in index
    assert "before" not in index
    assert index.endswith("Rest.\n")
    assert "![one image](reproduced/leaks.png)" in (docs / "outpost.md").read_text()
    assert all(path.read_text() == text for path, text in pages(docs).items())
