"""A whole audit, in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.audits.scenes import small_config, small_experiment
from tests.results.made import changed

from leaktight.api.audit import PlannedAudit
from leaktight.audits.plan import AttackEntry, Experiment
from leaktight.audits.run import Watcher, check_something_ran, easier_than_training, run_audit
from leaktight.config.audit import build_experiment, build_tracks, complete
from leaktight.config.scenario import load_data
from leaktight.config.settings import load_config
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.results.folder import RunFolder
from leaktight.results.lines import line_of
from leaktight.results.schema import Round, Summary, Trial
from leaktight.results.store import read_summary, read_trials
from leaktight.runtime.executor import Inline


class Told(Watcher):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.begun: tuple[int, int] | None = None
        self.finished: list[str] = []
        self.rounds: list[tuple[str, int]] = []

    def round_done(self, defense: str, row: Round) -> None:
        self.rounds.append((defense, row.round))

    def trials_begin(self, done: int, total: int) -> None:
        self.begun = done, total

    def trial_done(self, trial: Trial) -> None:
        self.finished.append(trial.id)


def run(experiment: Experiment, folder: Path, watcher: Watcher | None = None, **changes: Any) -> Summary:
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"executor": Inline(), "scenario": {}, "command": "leaktight audit", "workers": 1}
    return run_audit(experiment, RunFolder(folder), watcher=watcher, **settings | changes)


def trials_of(folder: Path) -> dict[str, Trial]:
    return {name: changed(trial, seconds=0.0, client_seconds=0.0) for name, trial in read_trials(folder).items()}


def recomputed(trials: Sequence[Trial], metric: str) -> float:
    return float(np.mean([trial.score(metric) or 0.0 for trial in trials]))


def test_the_summary_says_what_the_trials_say(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "attack.0.iterations=4").keyed(bytes(32))
    summary = run(experiment, tmp_path / "run")
    assert summary == read_summary(tmp_path / "run")
    lines = trials_of(tmp_path / "run").values()
    assert len(lines) == 8
    for cell in summary.cells:
        own = [trial for trial in lines if (trial.attack, trial.defense) == (cell.attack, cell.defense)]
        assert sorted(cell.trial_ids) == sorted(trial.id for trial in own)
        for metric, best in (("psnr", max), ("ssim", max), ("mse", min)):
            score = cell.scores[metric]
            assert score.mean is not None
            low, high = score.ci95 or (None, None)
            valid = [trial for trial in own if trial.fault is None]
            assert score.mean == pytest.approx(recomputed(valid, metric))
            assert score.worst == pytest.approx(best(trial.score(metric) or 0.0 for trial in valid))
            assert low is not None
            assert high is not None
            assert low <= score.mean <= high
        assert all(trial.images and (tmp_path / "run" / trial.images.guess).exists() for trial in own)
    undefended = next(cell for cell in summary.cells if (cell.attack, cell.defense) == ("csdlg", "none"))
    control = [trial for trial in lines if (trial.attack, trial.defense) == ("mean_image", "none")]
    assert undefended.control["ssim"] == pytest.approx(recomputed(control, "ssim"))
    assert undefended.document()["lpips_alex"] is None
    assert {flag.code for flag in summary.flags} >= {"too-few-trials", "easier-than-training"}
    assert summary.ledger.local_steps == 1
    assert summary.over_time is None


def test_what_is_there_is_not_done_again(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path)
    whole = run(experiment, tmp_path / "whole")

    class Interrupted(Watcher):
        def trial_done(self, trial: Trial) -> None:
            if trial.id == experiment.trials[1].id:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "cut", Interrupted())
    watcher = Told()
    resumed = run(experiment, tmp_path / "cut", watcher)
    assert watcher.begun == (2, 8)
    assert len(watcher.finished) == 6
    assert trials_of(tmp_path / "cut") == trials_of(tmp_path / "whole")
    assert resumed.verdicts == whole.verdicts


def test_the_same_clients_are_attacked_over_time(tmp_path: Path) -> None:
    watcher = Told()
    experiment = small_experiment(tmp_path, "audit.every=2", "model.init=default")
    summary = run(experiment, tmp_path / "run", watcher)
    lines = trials_of(tmp_path / "run").values()
    clients: dict[int, set[str]] = {trial.trial: set() for trial in lines}
    for trial in lines:
        clients[trial.trial].add(trial.client)
    assert all(len(names) == 1 for names in clients.values())
    assert watcher.rounds == [
        (defense, number) for defense in ("no defense", "noise (noise_std 0.1)") for number in (1, 2)
    ]
    rows = [row for row in summary.over_time or () if row.defense == "none"]
    assert [row.round for row in rows] == [0, 2]
    assert all(0 <= (row.accuracy or -1) <= 1 for row in rows)
    for row in rows:
        own = [trial for trial in lines if trial.round == row.round and trial.defense == "none"]
        assert row.mean_of("ssim") == pytest.approx(
            recomputed([trial for trial in own if trial.attack == "csdlg"], "ssim")
        )
    assert summary.ledger.stage == "varies"


def test_the_tradeoff_trains_every_defense_to_the_end(tmp_path: Path) -> None:
    watcher = Told()
    experiment = small_experiment(tmp_path)
    summary = run(experiment, tmp_path / "run", watcher, weigh=True)
    assert len(watcher.rounds) == 6
    assert summary.tradeoff is not None
    rows = {row.defense: row for row in summary.tradeoff.rows}
    for name, row in rows.items():
        trained = json.loads((tmp_path / "run" / "training" / name / "summary.json").read_text())
        assert row.accuracy == trained["final"]["accuracy"]
        assert row.seconds_per_round == pytest.approx(np.median([each["seconds"] for each in trained["rounds"]]))
        own = [cell.worst_of("ssim") for cell in summary.cells if cell.role == "attack" and cell.defense == name]
        assert row.leak.worst == max((each for each in own if each is not None), default=None)
    assert any(row.on_front for row in rows.values())
    assert summary.tradeoff.recommendation is not None
    assert summary.tradeoff.recommendation.because


def test_a_defense_that_cannot_be_trained_is_named_and_the_others_are_audited(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "audit.attack_round=1", "defense={kind='lrp'}")
    summary = run(experiment, tmp_path / "run")
    assert "scheme" in summary.training_failed["lrp"]
    verdict = next(each for each in summary.verdicts if each.defense == "lrp")
    assert verdict.verdict == "cannot-conclude"
    check_something_ran(summary)


def test_an_audit_in_which_nothing_worked_is_an_error(tmp_path: Path) -> None:
    told = "attack={kind='csdlg', labels='given'}"
    summary = run(small_experiment(tmp_path, "threat.knows=['batch_size', 'local_training']", told), tmp_path / "run")
    assert {each.verdict for each in summary.verdicts} == {"cannot-conclude"}
    with pytest.raises(LeaktightError, match=r"every trial failed.*labels"):
        check_something_ran(summary)


def test_easier_updates_are_said_to_be_so(tmp_path: Path) -> None:
    told = easier_than_training(small_experiment(tmp_path))
    assert told is not None
    assert told.startswith("attacked: 1 examples in 1 steps of 1; training: 287 examples in 5 steps of 64; ")
    assert told.endswith("a table [production] adds a track of those")
    path = tmp_path / "plain.toml"
    path.write_text("[local]\nbatch_size = 8\nepochs = 1\n")
    config = complete(load_config(path), trials=1, defenses_named=False)
    assert easier_than_training(build_experiment(config, *load_data(config), adaptive=False)) is None


def test_an_attacker_who_knows_the_defense_joins(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, adaptive=True)
    knowing = [each for each in experiment.attacks if isinstance(each, AttackEntry) and each.adaptive]
    assert [(each.name, each.against) for each in knowing] == [("csdlg", "noise")]
    summary = run(experiment, tmp_path / "run")
    assert len(summary.cells) == 5
    verdict = next(each for each in summary.verdicts if each.defense == "noise")
    assert sorted("defense" in each.threat.knows for each in verdict.attackers) == [False, True]
    assert "no-adaptive-attacker" not in {flag.code for flag in summary.flags}
    knowing_lines = [trial for trial in trials_of(tmp_path / "run").values() if trial.adaptive]
    assert [trial.status for trial in knowing_lines] == ["done", "done"]
    assert "'kind': 'noise'" in str(knowing_lines[0].attack_settings["adaptation"])
    assert knowing_lines[0].ledger.defense_known is True
    assert knowing_lines[0].ledger.labels == "given"


PRODUCTION = """
[production.local]
batch_size = 128
[production.federation]
rounds = 2
[production.defense]
kind = "none"
[[production.attack]]
kind = "dlg"
iterations = 1
backend = "eager"
[[production.attack]]
kind = "mean_image"
"""


def test_the_production_track_is_a_second_experiment_of_the_same_run(tmp_path: Path) -> None:
    config = small_config(tmp_path, "audit.trials=1", more=PRODUCTION)
    experiment, production = build_tracks(config, adaptive=False)
    watcher = Told()
    summary = run(experiment, tmp_path / "run", watcher, production=production)
    assert watcher.rounds == [("no defense (production)", 1)]
    assert (tmp_path / "run" / "training" / "production" / "none" / "round-0001.state").exists()
    lines = trials_of(tmp_path / "run")
    attacked = lines["production.none.dlg.t000.r001"]
    assert attacked.status == "done", attacked.error
    assert (attacked.track, attacked.ledger.stage, attacked.ledger.num_examples) == ("production", "after 1 round", 287)
    assert attacked.model_accuracy is not None
    assert lines["none.dlg.t000.r000"].track == "diagnostic", "the positive control of the production track"
    assert "noise.dlg.t000.r000" not in lines
    assert {(each.track, each.defense) for each in summary.verdicts} == {
        ("diagnostic", "none"),
        ("diagnostic", "noise"),
        ("production", "none"),
    }
    assert (summary.ledger.num_examples, summary.over_time) == (1, None), "of the diagnostic track alone"
    assert summary.spending is not None
    assert summary.spending.model_dump(exclude={"minutes"}) == {
        "trials": 7,
        "planned": 7,
        "budget": None,
        "ended": "all trials",
    }
    flag = next(flag for flag in summary.flags if flag.code == "easier-than-training")
    assert "the production track attacks those" in flag.detail


def test_a_budget_without_a_trial_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LeaktightError, match=r"within 1e-09 minutes; raise --budget, and continue with --resume"):
        run(small_experiment(tmp_path), tmp_path / "run", budget=1e-9)


def test_a_budget_may_differ_when_a_run_goes_on(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path)
    summary = run(experiment, tmp_path / "run", budget=60)
    assert summary.spending is not None
    assert (summary.spending.budget, summary.spending.ended, summary.spending.trials) == (60, "all trials", 8)
    assert summary.spending.minutes > 0
    again = run(experiment, tmp_path / "run", Told(), budget=1e-9)
    assert again.spending is not None
    assert again.spending.ended == "all trials"
    assert again.verdicts == summary.verdicts


def test_a_finished_run_keeps_its_digest_when_it_is_resumed(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path)
    before = run(experiment, tmp_path / "run")
    assert run(experiment, tmp_path / "run", budget=60) == before == read_summary(tmp_path / "run")


def test_a_run_that_was_changed_does_not_get_a_new_digest(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    experiment = build_experiment(config, *load_data(config), adaptive=False)
    planned = PlannedAudit("audit", config, experiment, None, {})
    before = planned.run(tmp_path / "run")
    file = tmp_path / "run" / "trials.jsonl"
    lines = file.read_text()
    first = next(iter(read_trials(tmp_path / "run").values()))
    file.write_bytes(lines.encode() + line_of(changed(first, id=first.id.replace(".t000", ".t009"))) + b'{"schema')
    again = planned.run(tmp_path / "run", resume=True)
    assert again.verdicts == before.verdicts, "an interrupted run has more trials, or a torn one"
    file.write_text(lines.replace('"update_changed": true', '"update_changed": false', 1))
    with pytest.raises(UsageError, match=r"was changed after it was written \(trial .*: changed\); restore it, or"):
        planned.run(tmp_path / "run", resume=True)


def test_a_run_that_goes_on_has_no_verdict_until_it_ends(tmp_path: Path) -> None:
    class Stopped(Watcher):
        def trial_done(self, trial: Trial) -> None:
            raise KeyboardInterrupt

    experiment, path = small_experiment(tmp_path), tmp_path / "run"
    whole = run(experiment, path)
    lines = (path / "trials.jsonl").read_text().splitlines(keepends=True)
    (path / "trials.jsonl").write_text("".join(lines[:4]))
    (path / "junit.xml").write_text("of the earlier verdicts")
    with pytest.raises(KeyboardInterrupt):
        run(experiment, path, Stopped())
    assert read_summary(path) is None
    assert not (path / "junit.xml").exists()
    assert run(experiment, path).verdicts == whole.verdicts
