"""A whole audit, in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.audit.scenes import small_experiment

from leaktight.audit.plan import AttackEntry, Experiment
from leaktight.audit.run import Watcher, check_something_ran, easier_than_training, run_audit
from leaktight.config.audit import build_experiment, complete
from leaktight.config.scenario import load_data
from leaktight.config.settings import load_config
from leaktight.core.errors import LeaktightError
from leaktight.fl.run_folder import RunFolder
from leaktight.runtime.executor import Inline


class Told(Watcher):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.begun: tuple[int, int] | None = None
        self.finished: list[str] = []
        self.rounds: list[tuple[str, int]] = []

    def round_done(self, defense: str, row: dict[str, Any]) -> None:
        self.rounds.append((defense, row["round"]))

    def trials_begin(self, done: int, total: int) -> None:
        self.begun = done, total

    def trial_done(self, line: Mapping[str, Any]) -> None:
        self.finished.append(line["id"])


def run(experiment: Experiment, folder: Path, watcher: Watcher | None = None, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"executor": Inline(), "scenario": {}, "command": "leaktight audit", "workers": 1}
    return run_audit(experiment, RunFolder(folder), watcher=watcher, **settings | changes)


def lines_of(folder: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    return {line["id"]: {key: value for key, value in line.items() if key != "seconds"} for line in lines}


def recomputed(lines: Sequence[Mapping[str, Any]], metric: str) -> float:
    return float(np.mean([np.mean(line["scores"][metric]) for line in lines]))


def test_the_summary_says_what_the_trials_say(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "attack.0.iterations=4")
    summary = run(experiment, tmp_path / "run")
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    lines = lines_of(tmp_path / "run").values()
    assert len(lines) == 8
    for cell in summary["cells"]:
        own = [line for line in lines if (line["attack"], line["defense"]) == (cell["attack"], cell["defense"])]
        assert sorted(cell["trial_ids"]) == sorted(line["id"] for line in own)
        for metric, best in (("psnr", max), ("ssim", max), ("mse", min)):
            assert cell[metric]["mean"] == pytest.approx(recomputed(own, metric))
            assert cell[metric]["worst"] == pytest.approx(best(np.mean(line["scores"][metric]) for line in own))
            assert cell[metric]["ci95"][0] <= cell[metric]["mean"] <= cell[metric]["ci95"][1]
        assert all((tmp_path / "run" / line["images"]["guess"]).exists() for line in own)
    undefended = next(cell for cell in summary["cells"] if (cell["attack"], cell["defense"]) == ("csdlg", "none"))
    control = [line for line in lines if (line["attack"], line["defense"]) == ("mean_image", "none")]
    assert undefended["control"]["ssim"] == pytest.approx(recomputed(control, "ssim"))
    assert undefended["lpips_alex"] is None
    assert {flag["code"] for flag in summary["flags"]} >= {"too-few-trials", "easier-than-training"}
    assert summary["ledger"]["local_steps"] == 1
    assert summary["over_time"] is None


def test_what_is_there_is_not_done_again(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path)
    whole = run(experiment, tmp_path / "whole")

    class Interrupted(Watcher):
        def trial_done(self, line: Mapping[str, Any]) -> None:
            if line["id"] == experiment.trials[1].id:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "cut", Interrupted())
    watcher = Told()
    resumed = run(experiment, tmp_path / "cut", watcher)
    assert watcher.begun == (2, 8)
    assert len(watcher.finished) == 6
    assert lines_of(tmp_path / "cut") == lines_of(tmp_path / "whole")
    assert resumed["verdicts"] == whole["verdicts"]


def test_the_same_clients_are_attacked_over_time(tmp_path: Path) -> None:
    watcher = Told()
    experiment = small_experiment(tmp_path, "audit.every=2", "model.init=default")
    summary = run(experiment, tmp_path / "run", watcher)
    lines = lines_of(tmp_path / "run").values()
    clients: dict[int, set[str]] = {line["trial"]: set() for line in lines}
    for line in lines:
        clients[line["trial"]].add(line["client"])
    assert all(len(names) == 1 for names in clients.values())
    assert watcher.rounds == [(defense, number) for defense in ("none", "noise") for number in (1, 2)]
    rows = [row for row in summary["over_time"] if row["defense"] == "none"]
    assert [row["round"] for row in rows] == [0, 2]
    assert all(0 <= row["accuracy"] <= 1 for row in rows)
    for row in rows:
        own = [line for line in lines if line["round"] == row["round"] and line["defense"] == "none"]
        assert row["ssim"]["mean"] == pytest.approx(
            recomputed([line for line in own if line["attack"] == "csdlg"], "ssim")
        )
    assert summary["ledger"]["stage"] == "varies"


def test_the_tradeoff_trains_every_defense_to_the_end(tmp_path: Path) -> None:
    watcher = Told()
    experiment = small_experiment(tmp_path)
    summary = run(experiment, tmp_path / "run", watcher, weigh=True)
    assert len(watcher.rounds) == 6
    rows = {row["defense"]: row for row in summary["tradeoff"]["rows"]}
    for name, row in rows.items():
        trained = json.loads((tmp_path / "run" / "training" / name / "summary.json").read_text())
        assert row["accuracy"] == trained["final"]["accuracy"]
        assert row["seconds_per_round"] == pytest.approx(np.median([each["seconds"] for each in trained["rounds"]]))
        assert row["leak"]["worst"] == max(
            cell["ssim"]["worst"] for cell in summary["cells"] if cell["role"] == "attack" and cell["defense"] == name
        )
    assert any(row["on_front"] for row in rows.values())
    assert summary["tradeoff"]["recommendation"]["because"]


def test_a_defense_that_cannot_be_trained_is_named_and_the_others_are_audited(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "audit.attack_round=1", "defense={kind='lrp'}")
    summary = run(experiment, tmp_path / "run")
    assert "scheme" in summary["training_failed"]["lrp"]
    verdict = next(each for each in summary["verdicts"] if each["defense"] == "lrp")
    assert verdict["verdict"] == "cannot-conclude"
    check_something_ran(summary)


def test_an_audit_in_which_nothing_worked_is_an_error(tmp_path: Path) -> None:
    summary = run(small_experiment(tmp_path, "threat.knows=['batch_size', 'local_training']"), tmp_path / "run")
    assert {each["verdict"] for each in summary["verdicts"]} == {"cannot-conclude"}
    with pytest.raises(LeaktightError, match=r"every trial failed.*labels"):
        check_something_ran(summary)


def test_easier_updates_are_said_to_be_so(tmp_path: Path) -> None:
    told = easier_than_training(small_experiment(tmp_path))
    assert told == "attacked: 1 examples in 1 steps of 1; training: 287 examples in 5 steps of 64"
    path = tmp_path / "plain.toml"
    path.write_text("[local]\nbatch_size = 8\nepochs = 1\n")
    config = complete(load_config(path), trials=1, defenses_named=False)
    assert easier_than_training(build_experiment(config, *load_data(config), adaptive=False)) is None


def test_an_attacker_who_knows_the_defense_joins(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, adaptive=True)
    knowing = [each for each in experiment.attacks if isinstance(each, AttackEntry) and each.adaptive]
    assert [(each.name, each.against) for each in knowing] == [("csdlg", "noise")]
    summary = run(experiment, tmp_path / "run")
    assert len(summary["cells"]) == 5
    threats = [each["threat"]["knows"] for each in summary["verdicts"] if each["defense"] == "noise"]
    assert ["defense" in knows for knows in threats] == [False, True]
    assert "no-adaptive-attacker" not in {flag["code"] for flag in summary["flags"]}
    knowing_lines = [line for line in lines_of(tmp_path / "run").values() if line["adaptive"]]
    assert [line["status"] for line in knowing_lines] == ["done", "done"]
    assert knowing_lines[0]["attack_settings"]["adaptation"]["defense"]["kind"] == "noise"
    assert knowing_lines[0]["ledger"]["defense_known"] is True
    assert knowing_lines[0]["ledger"]["labels"] == "given"
