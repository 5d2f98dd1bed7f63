"""A training run in a folder: a checkpoint after every round, a summary at the end. Resuming gives the same result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import safetensors.torch

from leaktight.core.files import write_atomically
from leaktight.core.tensors import digest
from leaktight.engines import inprocess
from leaktight.engines.checkpoints import Checkpoint, Checkpoints, model_hash
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.local import overall
from leaktight.fl.protocol import RoundOutcome
from leaktight.results.folder import RunFolder
from leaktight.results.schema import SCHEMA_VERSION, DefenseCost, Final, Round, TrainingSummary


class Engine(Protocol):
    """Runs rounds: `engines.inprocess.run`, or another transport of the same messages."""

    def __call__(
        self,
        federation: Federation,
        state: FederationState | None = None,
        *,
        workers: int | None = None,
        after_round: inprocess.AfterRound | None = None,
        on_reports: inprocess.OnReports = ...,
        after_client: Callable[[], None] = ...,
        until: int | None = None,
    ) -> FederationState: ...


def train(
    federation: Federation,
    folder: RunFolder,
    *,
    engine: Engine = inprocess.run,
    defense_kind: str = "none",
    defense_settings: Mapping[str, object] | None = None,
    workers: int | None = None,
    after_round: Callable[[Round], None] = lambda row: None,
    after_client: Callable[[], None] = lambda: None,
    after_state: Callable[[FederationState], None] = lambda state: None,
    until: int | None = None,
    keep: int = 1,
    from_round: int | None = None,
    retry: str | None = None,
) -> TrainingSummary:
    """Train the remaining rounds of a run and return its summary. `after_round` is also called for earlier rounds.

    defense_kind, defense_settings: of the federation's defense, for the summary.
    after_state: called with the state after each round, before its checkpoint is written.
    until: stop before this round, counted from 0; None to train all. keep: how many checkpoints are kept.
    from_round: set this round, counted from 1, and all later ones aside, and train them again. retry: what to do if a
    checkpoint is damaged, for the error; by default, to go back.
    """
    checkpoints = Checkpoints(folder, keep, retry)
    if from_round is not None:
        checkpoints.go_back(from_round, federation.first_state(), counts=federation.counts)
    point = checkpoints.newest()
    state, rows, undone, models = point.state, list(point.rows), point.undone, dict(point.models)
    for row in rows:
        after_round(row)
    began = time.perf_counter()

    reports: dict[str, Mapping[str, float]] = {}

    def hear(of_clients: inprocess.Reports) -> None:
        reports.clear()
        reports.update(of_clients)

    def finished(outcome: RoundOutcome, now: FederationState) -> None:
        nonlocal began, state, undone
        seconds = time.perf_counter() - began
        rows.append(_row(outcome, reports, seconds))
        after_state(now)
        state, undone = (now, None) if undone is None else undone.counted(now)
        if federation.counts:
            models[str(len(rows))] = model_hash(state)
        checkpoints.store(Checkpoint(state, tuple(rows), undone, models))
        after_round(rows[-1])
        began = time.perf_counter()

    def played(stop: int | None) -> FederationState:
        return engine(
            federation,
            state,
            workers=workers,
            after_round=finished,
            on_reports=hear,
            after_client=after_client,
            until=stop,
        )

    while undone is not None and len(rows) < min(federation.plan.rounds, until or federation.plan.rounds):
        played(len(rows) + 1)
    final = played(until)
    weights = {**final.server.params, **final.server.buffers}
    write_atomically(folder.model, safetensors.torch.save({name: each.contiguous() for name, each in weights.items()}))
    summary = TrainingSummary(
        schema_version=SCHEMA_VERSION,
        run=str(folder.path),
        rounds=tuple(rows),
        final=Final(accuracy=rows[-1].accuracy, loss=rows[-1].loss),
        defense=DefenseCost.model_validate(
            {"kind": defense_kind, "settings": dict(defense_settings or {}), **_defense_figures(rows)}
        ),
        seconds=sum(row.seconds for row in rows),
        model_digest=digest(weights),
    )
    folder.write_training(summary)
    return summary


def _row(outcome: RoundOutcome, reports: inprocess.Reports, seconds: float) -> Round:
    figures: dict[str, list[float]] = {}
    for report in reports.values():
        for name, value in report.items():
            figures.setdefault(name, []).append(value)
    client = {name: overall(name, values) for name, values in sorted(figures.items())}
    return Round(
        round=outcome.broadcast.round + 1,
        accuracy=outcome.score.accuracy if outcome.score else None,
        loss=outcome.score.loss if outcome.score else None,
        seconds=seconds,
        bytes_up=outcome.bytes_up,
        bytes_down=outcome.bytes_down,
        clients=len(outcome.updates),
        failures=dict(outcome.failures),
        flags=dict(outcome.flags),
        learning_rate=outcome.learning_rate,
        train_loss=client.pop("loss", None),
        client=client,
    )


def _defense_figures(rows: list[Round]) -> dict[str, float]:
    """The defense's own figures over all rounds, and its share of the clients' time."""
    totals: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.client.items():
            totals.setdefault(name, []).append(value)
    means = {name: overall(name, values) for name, values in totals.items()}
    if not means:
        return {}  # clients on other machines send no reports
    spent, whole, steps = (means.pop(name) for name in ("defense_seconds", "seconds", "steps"))
    return {"share_of_time": spent / whole, "seconds_per_step": spent / steps, **means}
