"""Runs grow: a resumed run with more trials, attacks, defenses or rounds is the run that was made at that size."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.audits.scenes import SMALL
from tests.results.made import changed

import leaktight as lt
from leaktight.audits.run import Watcher
from leaktight.core import files
from leaktight.core.errors import UsageError
from leaktight.results.schema import Summary, Trial
from leaktight.results.store import read_trials
from leaktight.results.verify import verify

SECRET = f"secret_seed={'5' * 64}"
CLIP = '\n[[defense]]\nkind = "clipping"\n'
DLG = '\n[[attack]]\nkind = "dlg"\niterations = 1\nrestarts = 1\nbackend = "eager"\n'


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


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
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


@pytest.mark.slow
@pytest.mark.parametrize(("after", "options", "more"), GROWTHS, ids=NAMES)
def test_a_finished_run_grows_to_the_run_of_that_size_but_for_the_look(
    after: str, options: dict[str, Any], more: int
) -> None:
    audit(scene(), "run")
    watcher = Counted()
    grown = audit(scene(after), "run", resume=True, watcher=watcher, workers=2 if after == DLG else 0, **options)
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


def settings_of(run: str) -> dict[str, Any]:
    return tomllib.loads(Path(run, "config.toml").read_text())


def test_without_a_config_the_run_has_its_own_settings_and_named_methods_are_added() -> None:
    audit(scene(), "runs/audit-001")
    watcher = Counted()
    lt.audit(
        resume=True,
        trials=3,
        attacks=["dlg"],
        settings=["attack.iterations=1", "attack.restarts=1", "attack.backend=eager"],
        adaptive=False,
        watcher=watcher,
    )
    assert len(watcher.ran) == 4 + 2 * 3, "one more victim of 4 cells, and 3 of each of 2 new cells"
    audit(scene(DLG), "whole", trials=3)
    grown, whole = settings_of("runs/audit-001"), settings_of("whole")
    csdlg, control, dlg = whole.pop("attack")
    assert grown.pop("attack") == [csdlg, dlg, control], "controls come last"
    assert grown == whole
    assert trials_of("runs/audit-001") == trials_of("whole")
    assert sorted(Path("runs").iterdir()) == [Path("runs/audit-001")]


def test_without_a_folder_the_run_with_these_settings_goes_first_and_then_the_newest() -> None:
    named = {"attacks": ["mean_image", lt.attacks.Dlg(iterations=1, restarts=1, backend="eager")]}
    for name, seed in (("audit-001", "seed=1"), ("audit-002", "seed=2")):
        audit(scene(), f"runs/{name}", seed, **named)
    watcher = Counted()
    same = audit("small.toml", None, "seed=1", resume=True, watcher=watcher, **named)  # type: ignore[arg-type]
    assert (same.run, watcher.ran) == ("runs/audit-001", [])
    grown = lt.audit(resume=True, trials=3, adaptive=False, watcher=watcher)
    assert (grown.run, len(watcher.ran)) == ("runs/audit-002", 4)


def test_history_has_what_the_run_was_and_the_digest_covers_it() -> None:
    first = audit(scene(), "run")
    before = Path("run/config.toml").read_text()
    assert not Path("run/history.json").exists()
    audit(scene(), "run", resume=True, trials=3)
    audit(scene(DLG), "run", resume=True, trials=3)
    first_stage, second = json.loads(Path("run/history.json").read_text())["stages"]
    assert first_stage == {
        "config": before,
        "command": "leaktight.audit() in Python",
        "trials": 8,
        "digest": first.digest,
    }
    assert tomllib.loads(second["config"])["audit"]["trials"] == 3
    summary = audit(scene(DLG), "run", resume=True, trials=3)
    assert summary.earlier_looks == 2
    assert "multiplied by 6" in next(flag.detail for flag in summary.flags if flag.code == "grown-after-a-look")
    assert "at most 10 % of runs" in (summary.answer.how_sure if summary.answer else "")
    Path("run/history.json").write_text("{}")
    assert verify(Path("run")).differences == ("history.json: changed",)
    Path("run/history.json").unlink()
    assert verify(Path("run")).differences == ("history.json: missing",)


REFUSED = [
    ({"settings": ["local.learning_rate=0.1"]}, "local.learning_rate is 0.2 there and 0.1 here"),
    ({"settings": ["seed=4"]}, "seed is 3 there and 4 here"),
    ({"settings": ["attack.csdlg.iterations=2"]}, "attack.csdlg.iterations is 1 there and 2 here (it changes"),
    ({"settings": ["defense.noise.noise_std=0.5"]}, "defense.noise.noise_std is"),
    (
        {"trials": 1},
        "audit.trials is 2 there and 1 here (2 victims there, 1 here: a run does not shrink; --budget ends",
    ),
    (
        {"settings": ["audit.metrics=['lpips_alex']"]},
        "audit.metrics is [] there and [lpips_alex] here (scores need the",
    ),
    ({"settings": ["federation.rounds=2"]}, "federation.rounds is 3 there and 2 here (a run does not shrink"),
    ({"settings": ["audit.attack_round=1"]}, "audit.attack_round is 0 there and 1 here"),
    ({"settings": ["threat.knows=['labels']"]}, "threat.knows is [batch_size, buffers, labels, local_training] there"),
]


def test_what_changes_finished_trials_is_refused_by_name_and_leaves_the_run_as_it_was() -> None:
    audit(scene(), "run")
    before = {path.name: path.read_bytes() for path in Path("run").iterdir() if path.is_file()}
    for changes, message in REFUSED:
        with pytest.raises(UsageError) as caught:
            lt.audit(out="run", resume=True, adaptive=False, **changes)  # type: ignore[arg-type]
        assert message in str(caught.value)
        assert str(caught.value).endswith("Resume it with its own settings, or choose another --out for a new run")
    assert {path.name: path.read_bytes() for path in Path("run").iterdir() if path.is_file()} == before
    assert verify(Path("run")).differences == ()


def test_methods_that_are_not_named_stay() -> None:
    audit(scene(DLG), "run", trials=1)
    grown = audit(scene(CLIP), "run", resume=True, trials=1)  # this config has no dlg
    assert {cell.attack for cell in grown.cells} == {"csdlg", "dlg", "mean_image"}
    assert {cell.defense for cell in grown.cells} == {"none", "noise", "clipping"}


def test_a_run_without_the_attackers_who_know_gets_them_and_does_not_lose_them() -> None:
    audit(scene(), "run", trials=1)
    grown = audit(scene(), "run", resume=True, trials=1, adaptive=True)
    assert [cell.attack for cell in grown.cells if cell.adaptive] == ["csdlg"]
    assert grown.earlier_looks == 1
    with pytest.raises(UsageError, match=r"1 finished trial that these settings leave out, .*--no-adaptive leaves"):
        audit(scene(), "run", resume=True, trials=1)


def test_a_second_defense_of_a_kind_renames_the_first_with_its_training() -> None:
    trained = ("audit.attack_round=1", "model.init=default")
    stronger = '\n[[defense]]\nkind = "noise"\nnoise_std = 0.5\n'
    audit(scene(), "run", *trained, trials=1)
    watcher = Counted()
    audit(scene(stronger), "run", *trained, resume=True, trials=1, watcher=watcher)
    assert len(watcher.ran) == 2, "the new defense alone"
    whole = audit(scene(stronger), "whole", *trained, trials=1)
    assert len({cell.defense for cell in whole.cells}) == 3
    assert trials_of("run") == trials_of("whole")
    assert pictures_of("run") == pictures_of("whole")
    assert [path.name for path in sorted(Path("run/training").iterdir())] == [
        path.name for path in sorted(Path("whole/training").iterdir())
    ]


def test_a_second_attack_of_a_kind_would_change_the_guesses_of_the_first() -> None:
    audit(scene(), "run", trials=1)
    longer = '\n[[attack]]\nkind = "csdlg"\niterations = 2\nbackend = "eager"\n'
    with pytest.raises(UsageError, match=r"csdlg would be csdlg\(iterations=1\) and draw other first guesses"):
        audit(scene(longer), "run", resume=True, trials=1)


@pytest.mark.parametrize("step", ["history", "config", "trial"])
def test_growth_that_is_interrupted_is_resumed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = audit(scene(), "run", trials=1)
    if step == "trial":
        with pytest.raises(KeyboardInterrupt):
            audit(scene(CLIP), "run", resume=True, trials=2, watcher=Counted(most=2))
    else:
        write = files.write_atomically

        def killed(path: Path, content: str | bytes) -> None:
            if path.stem == step:
                raise KeyboardInterrupt
            write(path, content)

        with monkeypatch.context() as patched:
            patched.setattr("leaktight.results.folder.write_atomically", killed)
            with pytest.raises(KeyboardInterrupt):
                audit(scene(CLIP), "run", resume=True, trials=2)
        again = audit(scene(), "run", resume=True, trials=1)
        assert (again.verdicts, again.earlier_looks) == (first.verdicts, 0), "the run can also stay as it was"
    grown = audit(scene(CLIP), "run", resume=True, trials=2)
    assert grown.earlier_looks == 1
    audit(scene(CLIP), "whole", trials=2)
    assert trials_of("run") == trials_of("whole")
    assert settings_of("run") == settings_of("whole")
    assert verify(Path("run")).differences == ()


def test_a_run_that_was_tampered_with_does_not_grow() -> None:
    audit(scene(), "run", trials=1)
    picture = next(Path("run/images").iterdir())
    picture.write_bytes(picture.read_bytes() + b"x")
    with pytest.raises(UsageError, match="was changed after it was written"):
        audit(scene(), "run", resume=True, trials=2)


def test_failed_trials_are_repeated_in_a_run_that_grew() -> None:
    broken = '\n[[attack]]\nkind = "linear_inversion"\n'
    audit(scene(broken), "run", trials=1)
    failed = {name for name, trial in trials_of("run").items() if trial.status == "failed"}
    assert failed, "the network has a convolution first"
    watcher = Counted()
    audit(scene(broken), "run", resume=True, trials=2, watcher=watcher)
    assert len(watcher.ran) == 6
    assert not failed & set(watcher.ran), "failed trials are kept"
    watcher = Counted()
    audit(scene(broken), "run", resume=True, trials=2, retry_failed=True, watcher=watcher)
    assert failed < set(watcher.ran)


@pytest.mark.slow
def test_a_tradeoff_grows_in_rounds_and_defenses() -> None:
    quick = {"trials": 1, "adaptive": False, "workers": 0}
    constant = 'local.schedule={kind="constant"}'
    lt.tradeoff(scene(), out="run", settings=[SECRET, constant], **quick)  # type: ignore[arg-type]
    more = [SECRET, constant, "federation.rounds=4"]
    grown = lt.tradeoff(scene(CLIP), out="run", resume=True, settings=more, **quick)  # type: ignore[arg-type]
    whole = lt.tradeoff(scene(CLIP), out="whole", settings=more, **quick)  # type: ignore[arg-type]
    assert grown.tradeoff
    assert whole.tradeoff
    assert [row.accuracy for row in grown.tradeoff.rows] == [row.accuracy for row in whole.tradeoff.rows]
    assert trials_of("run") == trials_of("whole")
    for name in ("none", "noise", "clipping"):
        ends = [json.loads(Path(run, "training", name, "summary.json").read_text()) for run in ("run", "whole")]
        assert ends[0]["model_digest"] == ends[1]["model_digest"]
        assert len(ends[0]["rounds"]) == 4
