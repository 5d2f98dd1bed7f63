"""A fault of the machine is no result: it ends the run, and resuming gives what an undisturbed run gives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.audits.faulty import FAULTS, FaultyAttack, FaultyDefense
from tests.audits.scenes import SMALL

import leaktight as lt
from leaktight.adaptive import auto
from leaktight.audits.run import Watcher
from leaktight.core.errors import CheckpointError, MachineError, UsageError
from leaktight.core.files import slug
from leaktight.fl import client
from leaktight.results.schema import Round, Summary
from leaktight.results.store import read_trials

DEFENSE = "tests.audits.faulty:FaultyDefense"
ERRORS = {
    "known": "the update is empty",
    "defect": r"ValueError: a matrix is singular\?\[2J",
    "exit": "SystemExit: 0",
    "impossible": "RuntimeError: .*tried to allocate 4503599627370496 bytes.*",
}
"""Errors of the method, and patterns of how they are told."""


@dataclass(frozen=True)
class Scene:
    """An audit of four trials after one round of training, whose defense and attack can be made to fail."""

    folder: Path

    def audit(self, **changes: Any) -> Summary:
        file = self.folder / "small.toml"
        file.write_text(f'secret_seed = "{"ab" * 32}"\n{SMALL}')
        defense = FaultyDefense(marker=str(self.folder / "defense"))
        attack = FaultyAttack(marker=str(self.folder / "attack"))
        settings: dict[str, Any] = {"out": self.folder / "run", "workers": 0, "adaptive": False}
        return lt.audit(
            file,
            attacks=[attack, lt.attacks.MeanImage()],
            defenses=[defense],
            settings=["audit.attack_round=1", "audit.trials=1"],
            **settings | changes,
        )

    def break_next(self, who: str, fault: str) -> None:
        (self.folder / who).write_text(fault)

    @property
    def results(self) -> dict[str, Any]:
        """All trials without their times, and all pictures."""
        times = {"seconds", "client_seconds"}
        trials = {name: trial.model_dump(exclude=times) for name, trial in read_trials(self.folder / "run").items()}
        return trials | {file.name: file.read_bytes() for file in (self.folder / "run" / "images").iterdir()}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scene = Scene(tmp_path_factory.mktemp("undisturbed"))
    scene.audit()
    return scene.results


def without_paths(results: dict[str, Any]) -> dict[str, Any]:
    """Results of runs in several folders; the markers' paths are settings."""
    return {
        name: {key: fact for key, fact in each.items() if "settings" not in key} if isinstance(each, dict) else each
        for name, each in results.items()
    }


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "killed"])
@pytest.mark.parametrize("who", ["defense", "attack"])
def test_a_fault_of_the_machine_is_no_result(scene: Scene, undisturbed: dict[str, Any], who: str, fault: str) -> None:
    scene.break_next(who, fault)
    with pytest.raises(MachineError, match=r"; .*(free|raise|use)"):
        scene.audit()
    assert not any(trial.status == "failed" for trial in read_trials(scene.folder / "run").values())
    assert not (scene.folder / "run" / "summary.json").exists()
    scene.audit(resume=True)
    assert without_paths(scene.results) == without_paths(undisturbed)


@pytest.mark.parametrize("who", ["defense", "attack"])
def test_a_killed_worker_is_no_result(scene: Scene, undisturbed: dict[str, Any], who: str) -> None:
    scene.break_next(who, "killed")
    with pytest.raises(MachineError, match="a worker process died"):
        scene.audit(workers=2)
    assert not any(trial.status == "failed" for trial in read_trials(scene.folder / "run").values())
    scene.audit(workers=2, resume=True)
    assert without_paths(scene.results) == without_paths(undisturbed)


@pytest.mark.parametrize(("fault", "told"), ERRORS.items())
def test_an_error_of_an_attack_is_a_failed_trial_until_it_is_retried(
    scene: Scene, undisturbed: dict[str, Any], fault: str, told: str
) -> None:
    scene.break_next("attack", fault)
    failed = next(trial for trial in _trials(scene, scene.audit()).values() if trial.status == "failed")
    assert failed.defense == "none"
    assert re.fullmatch(told, failed.error or "")
    scene.audit(resume=True)
    assert _trials(scene)[failed.id] == failed, "resuming alone repeats no trial"
    assert [cell.failed for cell in scene.audit(resume=True, retry_failed=True).cells] == [0] * 4
    assert without_paths(scene.results) == without_paths(undisturbed)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", ["defect", "exit", "impossible"])
def test_an_error_of_a_defense_fails_its_trials_until_they_are_retried(
    scene: Scene, undisturbed: dict[str, Any], fault: str, workers: int
) -> None:
    scene.break_next("defense", fault)
    summary = scene.audit(workers=workers)
    assert list(summary.training_failed) == [DEFENSE]
    assert re.fullmatch(f"{ERRORS[fault]}(; a method must not end the process)?", summary.training_failed[DEFENSE])
    assert [trial.defense for trial in _trials(scene).values() if trial.status == "failed"] == [DEFENSE] * 2
    assert scene.audit(resume=True, retry_failed=True).training_failed == {}
    assert without_paths(scene.results) == without_paths(undisturbed)


def test_nothing_to_retry_changes_nothing(scene: Scene) -> None:
    before = scene.audit()
    assert scene.audit(resume=True, retry_failed=True) == before


def test_a_new_run_has_nothing_to_retry(scene: Scene) -> None:
    with pytest.raises(UsageError, match="add --resume"):
        scene.audit(retry_failed=True)


def test_a_damaged_state_of_a_defense_is_no_result(scene: Scene, undisturbed: dict[str, Any]) -> None:
    scene.break_next("attack", "disk")
    with pytest.raises(MachineError):
        scene.audit()
    kept = scene.folder / "run" / "training" / slug(DEFENSE)
    (kept / "round-0001.state").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match=r"remove .*FaultyDefense to train it again"):
        scene.audit(resume=True)
    for file in kept.iterdir():
        file.unlink()
    scene.audit(resume=True)
    assert without_paths(scene.results) == without_paths(undisturbed)


def test_what_a_killed_process_was_writing_is_removed(scene: Scene) -> None:
    scene.audit()
    left = scene.folder / "run" / "images" / ".partial-abc"
    left.mkdir()
    (left / "half.png").write_bytes(b"half")
    scene.audit(resume=True)
    assert not left.exists()


class Impatient(Watcher):
    """Stops the run after the first round of the defense's training."""

    def round_done(self, name: str, row: Round) -> None:
        if name.startswith(DEFENSE):
            raise ValueError("stop here")


def test_whoever_watches_may_stop_the_training_of_a_defense(scene: Scene) -> None:
    with pytest.raises(ValueError, match="stop here"):
        scene.audit(watcher=Impatient())


def test_an_ensemble_does_not_go_on_without_an_attack_that_met_a_fault(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = FaultyAttack(marker=str(scene.folder / "attack"))
    monkeypatch.setitem(auto.ENSEMBLES, "quick", {"first": member, "second": member})
    scene.break_next("attack", "memory")
    with pytest.raises(MachineError, match="out of memory"):
        lt.audit(
            attacks=[{"kind": "auto", "budget": "quick"}],
            defenses=["none"],
            trials=1,
            out=scene.folder / "auto",
        )


def test_a_private_client_does_not_send_noise_for_a_fault(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    def fail(*_: object, **__: object) -> None:
        raise lt.LeaktightError("cannot compute") from MemoryError()

    monkeypatch.setattr(client, "local_update", fail)
    with pytest.raises(MachineError, match="out of memory"):
        lt.audit(attacks=["mean_image"], defenses=["client_dp"], trials=1, out=scene.folder / "run")


def _trials(scene: Scene, _: object = None) -> dict[str, lt.Trial]:
    return read_trials(scene.folder / "run")
