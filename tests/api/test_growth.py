"""Runs grow: a resumed run with more trials, attacks, defenses or rounds is the run that was made at that size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.audits.scenes import SMALL
from tests.results.made import changed

import leaktight as lt
from leaktight.audits.run import Watcher
from leaktight.results.schema import Summary, Trial
from leaktight.results.store import read_trials
from leaktight.results.verify import verify

SECRET = f"secret_seed={'5' * 64}"
CLIP = '\n[[defense]]\nkind = "clipping"\n'
DLG = '\n[[attack]]\nkind = "dlg"\niterations = 1\n'


class Counted(Watcher):
    """Which trials were run; stops after `most` of them."""

    def __init__(self, most: int | None = None) -> None:
        self.ran: list[str] = []
        self.most = most

    def trial_done(self, trial: Trial) -> None:
        self.ran.append(trial.id)
        if len(self.ran) == self.most:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def scene(more: str = "", *, name: str = "small.toml") -> str:
    Path(name).write_text(SMALL + more)
    return name


def audit(config: str | None, out: str, *settings: str, **options: Any) -> Summary:
    options = {"adaptive": False, **options}
    return lt.audit(config, out=out, settings=[SECRET, *settings], **options)


def trials_of(run: str) -> dict[str, Trial]:
    return {name: changed(trial, seconds=0.0, client_seconds=0.0) for name, trial in read_trials(Path(run)).items()}


def pictures_of(run: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(run, "images").iterdir()}


def plain(run: str) -> dict[str, Any]:
    """The summary of a run without places and times."""
    document: dict[str, Any] = json.loads(Path(run, "summary.json").read_text())
    for name in ("run", "command", "digest"):
        document.pop(name)
    document["spending"].pop("minutes")
    document["answer"].pop("costs")
    for cell in document["cells"]:
        cell.pop("seconds", None)
    return document


def require_equal(grown: str, whole: str) -> None:
    assert trials_of(grown) == trials_of(whole)
    assert pictures_of(grown) == pictures_of(whole)
    assert plain(grown) == plain(whole)
    assert Path(grown, "config.toml").read_bytes() == Path(whole, "config.toml").read_bytes()
    for run in (grown, whole):
        assert verify(Path(run)).differences == ()


GROWTHS: Sequence[tuple[str, dict[str, Any], int]] = [("", {"trials": 4}, 8), (DLG, {}, 4), (CLIP, {}, 4)]
NAMES = ["trials", "attack", "defense"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("after", "options", "more"), GROWTHS, ids=NAMES)
def test_a_run_that_nobody_saw_grows_to_the_run_of_that_size(
    after: str, options: dict[str, Any], more: int, workers: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        audit(scene(), "run", watcher=Counted(most=3))
    watcher = Counted()
    audit(scene(after), "run", resume=True, workers=workers, watcher=watcher, **options)
    assert len(watcher.ran) == 5 + more, "finished trials are not repeated"
    audit(scene(after), "whole", **options)
    require_equal("run", "whole")


@pytest.mark.parametrize(("after", "options", "more"), GROWTHS, ids=NAMES)
def test_a_finished_run_grows_to_the_run_of_that_size_but_for_the_look(
    after: str, options: dict[str, Any], more: int
) -> None:
    audit(scene(), "run")
    watcher = Counted()
    grown = audit(scene(after), "run", resume=True, watcher=watcher, **options)
    assert len(watcher.ran) == more
    assert grown.earlier_looks == 1
    whole = audit(scene(after), "whole", **options)
    assert [flag.code for flag in grown.flags if flag not in whole.flags] == ["grown-after-a-look"]
    for own, other in zip(grown.cells, whole.cells, strict=True):
        assert own.scores == other.scores
        if own.identification and other.identification:
            assert own.identification.chance == other.identification.chance
            assert own.identification.corrected == min(1.0, 2 * other.identification.corrected)
    shutil.copy("run/history.json", "whole/history.json")  # as if it had been looked at, too
    audit(scene(after), "whole", resume=True, **options)
    require_equal("run", "whole")
