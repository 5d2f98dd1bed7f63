from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch

from leaktight.core.errors import CheckpointError, LeaktightError, UsageError
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import digest
from leaktight.core.types import Params, State, Update
from leaktight.engines.training import train
from leaktight.fl.federation import Federation
from leaktight.fl.plan import FederationPlan
from leaktight.fl.state import load_checkpoint, save_checkpoint
from leaktight.report.figures import plot_learning_curve
from leaktight.results.folder import latest_folder, next_folder, open_run
from leaktight.results.schema import Round, TrainingSummary, parse

MakeFederation = Callable[..., Federation]


class Stop(Exception):
    pass


def test_a_run_that_was_cut_off_ends_in_the_same_model(make_federation: MakeFederation, tmp_path: Path) -> None:
    with open_run(tmp_path / "whole", "a = 1", resume=False) as folder:
        whole = train(make_federation(), folder, workers=1)

    def cut(row: Round) -> None:
        if row.round == 2:
            raise Stop

    with pytest.raises(Stop), open_run(tmp_path / "cut", "a = 1", resume=False) as folder:
        train(make_federation(), folder, workers=1, after_round=cut)
    with open_run(tmp_path / "cut", "a = 1", resume=True) as folder:
        rest = train(make_federation(), folder, workers=1)
        assert rest.model_digest == whole.model_digest
        assert [row.round for row in rest.rounds] == [1, 2, 3]
        assert [row.loss for row in rest.rounds] == [row.loss for row in whole.rounds]
        assert digest(safetensors.torch.load_file(folder.model)) == rest.model_digest
        again = train(make_federation(), folder, workers=1)
        assert again.model_digest == whole.model_digest


def test_the_summary_keeps_its_contract(make_federation: MakeFederation, tmp_path: Path) -> None:
    with open_run(tmp_path / "run", "", resume=False) as folder:
        summary = train(make_federation(), folder, workers=1)
        assert parse(TrainingSummary, folder.summary.read_text(), "") == summary
        document = json.loads(folder.summary.read_text())
        plot_learning_curve(summary, tmp_path / "curve.png")
    assert document["schema_version"] == 2
    assert set(document) >= {"rounds", "final", "defense", "seconds", "run"}
    assert set(document["final"]) == {"accuracy", "loss"}
    assert set(document["rounds"][0]) >= {"round", "accuracy", "loss", "seconds", "bytes_up", "bytes_down", "clients"}
    assert document["defense"]["kind"] == "none"
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob(".partial-*"))


@dataclass(frozen=True)
class Talkative(Defense):
    """Reports figures of all kinds."""

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        report("place", float(step.index))
        return step.gradient, state

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        rounds = state.get("rounds", 0) + 1
        report("epsilon", float(rounds))
        return update, {"rounds": rounds}


def test_the_summary_holds_what_the_defense_says_and_costs(make_federation: MakeFederation, tmp_path: Path) -> None:
    plan = FederationPlan(rounds=3)
    with open_run(tmp_path / "run", "", resume=False) as folder:
        summary = train(make_federation(defense=Talkative(), plan=plan), folder, defense_kind="mine", workers=1)
    figures, rows = summary.defense.figures, [row.client for row in summary.rounds]
    assert figures.keys() == {"place", "epsilon"}
    assert summary.defense.kind == "mine"
    steps = rows[0]["steps"]
    assert figures["place"] == pytest.approx((steps - 1) / 2), "the mean over steps, clients and rounds"
    assert [row["epsilon"] for row in rows] == [1.0, 2.0, 3.0]
    assert figures["epsilon"] == 3.0, "a budget is what was spent in the end"
    spent = sum(row["defense_seconds"] for row in rows)
    assert summary.defense.share_of_time == pytest.approx(spent / sum(row["seconds"] for row in rows))
    assert summary.defense.seconds_per_step == pytest.approx(spent / (3 * steps))


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    with open_run(tmp_path, "a = 1", resume=False):
        pass
    with (
        pytest.raises(UsageError, match="already holds a run; add --resume"),
        open_run(tmp_path, "a = 1", resume=False),
    ):
        pass
    with pytest.raises(UsageError, match="settings: a is 1 there and 2 here"), open_run(tmp_path, "a = 2", resume=True):
        pass


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with (
        open_run(tmp_path, "", resume=False),
        pytest.raises(UsageError, match="another process is writing"),
        open_run(tmp_path, "", resume=True),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LeaktightError, match="cannot write to"), open_run(tmp_path / "file" / "run", "", resume=False):
        pass


def test_folders_are_numbered_and_found_again(tmp_path: Path) -> None:
    for settings in ("a = 1", "a = 2", "a = 1"):
        with open_run(next_folder(tmp_path, "train"), settings, resume=False):
            pass
    assert latest_folder(tmp_path, "train", "a = 1").name == "train-003"
    assert latest_folder(tmp_path, "train", "a = 2").name == "train-002"
    with pytest.raises(UsageError, match="no run of train with these settings"):
        latest_folder(tmp_path, "train", "a = 3")


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x00" * 100], ids=["empty", "json", "zeros"])
def test_a_damaged_checkpoint_is_a_named_error(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "c").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"is damaged, or of an older version.*; start a new run"):
        load_checkpoint(tmp_path / "c")


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"a": 1})
    with pytest.raises(LeaktightError):
        save_checkpoint(tmp_path / "c", {"a": {2, 3}})
    assert load_checkpoint(tmp_path / "c") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
