"""Dry runs: counts, estimates of time and memory, and what is said of a plan that does not end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.audits.scenes import SMALL, small_experiment
from tests.here import Here
from torch import nn

from leaktight.api.audit import audit, plan
from leaktight.api.runs import PRELOAD
from leaktight.audits.advice import GOOD, LONG, problems_of
from leaktight.audits.experiment import TrialRunner
from leaktight.audits.forecast import Measured, check_defenses, crude_seconds, measure
from leaktight.audits.rehearsal import Load, Watch, attacked_load, load_of, reports_of, shrunk
from leaktight.core.errors import UsageError
from leaktight.core.protocols import ClientFacts, Defense
from leaktight.core.rng import Rng
from leaktight.core.training import LocalTraining
from leaktight.core.types import State
from leaktight.report.words import defense_words
from leaktight.results.forecast import Forecast
from leaktight.runtime.processes import Alone

HUGE = ("audit.local.samples=300", "audit.local.batch_size=3", "attack.0.iterations=300")
"""The 300 examples of each client in 100 local steps, all simulated."""


@pytest.fixture
def here(here: Here, tmp_path: Path) -> Here:
    (tmp_path / "small.toml").write_text(SMALL)
    return here


def measured(folder: Path, *overrides: str) -> Measured:
    return measure([small_experiment(folder, *overrides)], whole=False, processes=1, preload=())


def test_the_work_behind_an_update() -> None:
    assert load_of(LocalTraining(epochs=5, batch_size=16), 58) == Load(58, 20, 290, 4)
    assert load_of(LocalTraining(steps=3, batch_size=16), 58) == Load(58, 3, 48, 4)
    assert load_of(LocalTraining(samples=4, batch_size=2), 58) == Load(4, 2, 4, 2)


def test_the_rehearsal_of_a_large_training_is_small_and_of_a_small_one_the_same() -> None:
    large = LocalTraining(epochs=5, batch_size=500)
    assert load_of(shrunk(large, 3000, 1e-6), 3000).passes <= 128
    assert load_of(shrunk(large, 3000, 0.05), 3000) == Load(2, 1, 2), "a slow network"
    one = LocalTraining(samples=1, batch_size=1)
    assert load_of(shrunk(one, 3000, 1e-6), 3000) == load_of(one, 3000) == Load(1, 1, 1)


def test_counts_are_those_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL)
    found = plan("tradeoff", path, settings=["audit.trials=auto", "audit.attack_round=2"]).forecast()
    assert found.trials == (25, 100)
    assert sum(each.trials[0] for each in found.attacks) == 25
    assert [(each.defense, each.rounds, each.clients) for each in found.trainings] == [("none", 3, 2), ("noise", 3, 2)]
    assert found.training_rounds == 6
    assert (found.examples, found.local_steps, found.example_uses) == (1, 1, 1)
    assert not found.problems
    path.write_text(SMALL)
    assert plan("audit", path, settings=["audit.attack_round=2"]).forecast().training_rounds == 4, "up to the attack"


def test_a_plan_that_does_not_end_is_said_to_be_so_with_what_to_change(tmp_path: Path) -> None:
    found = measured(tmp_path, *HUGE, "audit.trials=2000")
    assert attacked_load(small_experiment(tmp_path, *HUGE)) == Load(288, 96, 288, 96)
    (problem,) = problems_of(found)
    assert "does not end in reasonable time: about" in problem.what
    assert "288 examples behind an update in 96 local steps, which are simulated" in problem.what
    assert "8000 trials" in problem.what
    assert found.total(least=True) > LONG
    settings = [(each.setting, each.value) for each in problem.changes]
    assert settings[0] == ("audit.local.samples = 8 and audit.local.batch_size", "3")
    assert ("audit.trials", "5") in settings
    times = [each.seconds for each in problem.changes]
    assert times == sorted(times, reverse=True)
    assert times[-1] <= GOOD


def test_what_is_suggested_helps(tmp_path: Path) -> None:
    before = measured(tmp_path, *HUGE, "attack.0.iterations=20")
    after = measured(tmp_path, *HUGE, "attack.0.iterations=20", "audit.local.samples=8")
    assert after.total(least=True) - after.start < (before.total(least=True) - before.start) / 10


def test_steps_that_are_simulated_may_be_matched_as_one(tmp_path: Path) -> None:
    found = measured(tmp_path, "audit.local.epochs=97", "audit.local.samples=8", "attack.0.iterations=300")
    slow = replace(found, items=[replace(each, least=each.least * 1000) for each in found.items])
    (problem,) = problems_of(slow)
    assert (problem.changes[0].setting, problem.changes[0].value) == ("attack.csdlg.local", "one_batch")
    assert problem.changes[0].seconds < slow.total(least=True) / 10


def test_a_budget_ends_a_plan_in_any_case(tmp_path: Path) -> None:
    assert not problems_of(measured(tmp_path, *HUGE, "audit.trials=2000"), budget=10)


def test_memory_that_is_not_there(tmp_path: Path) -> None:
    found = replace(measured(tmp_path, *HUGE), peak=10**15, processes=2)
    (problem,) = [each for each in problems_of(found) if "memory" in each.what]
    assert "of memory, the machine has" in problem.what
    assert problem.changes[0].setting.startswith("audit.local.samples = 8")
    machine = found.memory.machine
    assert machine is not None
    tight = replace(found, peak=machine * 2 // 3, base=machine // 100)
    (problem,) = [each for each in problems_of(tight) if "memory" in each.what]
    assert [(each.setting, each.value) for each in problem.changes] == [("--workers", "1")]


def test_more_examples_and_steps_keep_more_memory(tmp_path: Path) -> None:
    peaks = [
        measured(tmp_path, f"audit.local.samples={number}", "audit.local.batch_size=2").peak for number in (2, 20, 40)
    ]
    assert peaks[0] < peaks[1] < peaks[2]
    assert peaks[2] / peaks[1] == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("size", [(1, 1), (8, 4)])
def test_the_estimate_is_near_a_real_trial(tmp_path: Path, size: tuple[int, int]) -> None:
    """Of one example; and of eight in two steps, where the attack also compares 70 orders of them."""
    overrides = (f"audit.local.samples={size[0]}", f"audit.local.batch_size={size[1]}", "attack.0.iterations=2")
    experiment = small_experiment(tmp_path, *overrides).keyed(bytes(32))
    found = measure([experiment], whole=False, processes=1, preload=PRELOAD)
    spec = next(each for each in experiment.trials if each.attack.role == "attack")
    with Alone().start(lambda job, tell: None):
        began = time.process_time()
        assert TrialRunner(experiment)(spec.id, lambda _: None)[0].error is None
    real = time.process_time() - began
    assert real / 3 < found.items[0].cost.seconds < real * 3


def test_an_attack_is_extrapolated_from_its_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 5.5, 6.0])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    watch = Watch(limit=100.0)
    for iteration in range(3):
        watch(iteration, 0.0, None)
    assert watch.extrapolated(101) == 5.0 + 0.5 * 100


def test_how_often_an_attack_reports(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "attack.0.iterations=7")
    assert reports_of(experiment.attacks[0].value, [], Rng(0)) == 7 * 20, "evaluations of L-BFGS"


def test_an_attack_that_cannot_run_is_named_with_its_reason(here: Here) -> None:
    several = ("--set", "audit.local.samples=3", "--set", "audit.local.batch_size=3")
    code, out, errors = here("audit", "small.toml", "--dry-run", "--attack", "idlg", "--attack", "csdlg", *several)
    assert code == 0
    assert "idlg" in out
    assert "cannot run here: expected 1 example for idlg, got 3" in " ".join(out.split())
    code, out, errors = here("audit", "small.toml", "--dry-run", "--attack", "idlg", *several)
    assert code == 1
    assert "no attack of this plan can run; idlg: expected 1 example for idlg, got 3" in errors


@dataclass(frozen=True, kw_only=True)
class Picky(Defense):
    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        raise ValueError("no batch norm here")


def test_a_defense_that_cannot_start_is_an_error_of_the_dry_run(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path)
    picky = [experiment.defenses[0], replace(experiment.defenses[1], value=Picky())]
    with pytest.raises(UsageError, match="cannot start on this network: ValueError: no batch norm here"):
        check_defenses(replace(experiment, defenses=picky))


@pytest.mark.parametrize("command", [("audit", "small.toml"), ("tradeoff", "small.toml"), ("train",)])
def test_the_document_has_the_same_facts(here: Here, tmp_path: Path, command: Sequence[str]) -> None:
    code, out, _ = here(*command, "--dry-run", "--json", "--workers", "1")
    assert code == 0
    found = Forecast.model_validate_json(out)
    assert json.loads(out)["command"] == command[0]
    code, text, _ = here(*command, "--dry-run", "--workers", "1")
    words = " ".join(text.split())
    assert "in 1 process (an estimate)" in words
    for work in found.trainings:
        assert f"{defense_words(work.defense, work.defense_settings)}: {work.rounds} round" in words
    for each in found.attacks:
        assert each.attack in words
    assert found.basis in words
    assert all(len(line) <= 80 for line in text.splitlines())
    assert not (tmp_path / "runs").exists()


def test_a_warning_before_a_real_run(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("leaktight.api.audit.PlannedAudit.run", stop)
    huge = [part for each in (*HUGE, "audit.trials=2000") for part in ("--set", each)]
    _, out, errors = here("audit", "small.toml", "--workers", "0", *huge)
    assert out == ""
    assert "warning: the plan does not end in reasonable time: about" in errors
    assert "change audit.local.samples = 8 and audit.local.batch_size = 3" in errors
    _, _, errors = here("audit", "small.toml", "--workers", "0")
    assert "warning" not in errors
    with pytest.warns(UserWarning, match="does not end in reasonable time"), pytest.raises(KeyboardInterrupt):
        audit(tmp_path / "small.toml", settings=[*HUGE, "audit.trials=2000"])


def test_a_short_plan_is_not_rehearsed_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaktight.api.forecast.measure", None)
    path = tmp_path / "mine.toml"
    path.write_text(SMALL)
    planned = plan("audit", path)
    assert crude_seconds(planned.experiments, whole=False) < 60
    assert planned.doubts() == ()


def test_a_dry_run_of_a_resumed_run_counts_what_is_left(here: Here) -> None:
    assert here("audit", "small.toml", "--trials", "1", "--no-adaptive", "--out", "run", "--workers", "0")[0] == 0
    more = ("audit", "--resume", "--out", "run", "--no-adaptive", "--workers", "0", "--dry-run")
    code, text, _ = here(*more, "--trials", "3", "--json")
    assert code == 0
    found = Forecast.model_validate_json(text)
    assert found.grows_by == ("audit.trials from 1 to 3",)
    assert found.trials == (2 * found.finished,) * 2
    assert sum(each.trials[0] for each in found.attacks) == found.trials[0]
    _, text, _ = here(*more)
    assert f"0; {found.finished} more are finished" in text


def test_a_dry_run_is_refused_where_the_run_would_be(here: Here) -> None:
    assert here("audit", "small.toml", "--trials", "1", "--no-adaptive", "--out", "run", "--workers", "0")[0] == 0
    changed = ("audit", "--resume", "--out", "run", "--set", "local.learning_rate=0.5", "--dry-run")
    code, _, words = here(*changed)
    assert code == 2
    assert "local.learning_rate is" in words
    code, _, words = here("audit", "small.toml", "--out", "run", "--dry-run")
    assert code == 2
    assert "already holds a run; add --resume" in words


def test_a_forecast_names_defenses_with_their_settings(here: Here) -> None:
    code, text, _ = here("tradeoff", "small.toml", "--trials", "1", "--workers", "0", "--dry-run")
    assert code == 0
    words = " ".join(text.split())
    assert "knowing noise (noise_std" in words
    assert "training no defense: 3 rounds" in words
    assert "training noise (noise_std" in words
