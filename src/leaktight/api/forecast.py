"""The forecast of a planned audit, trade-off, training or inspection: its work, time, memory and problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leaktight.api.runs import PRELOAD, parse_workers
from leaktight.audits.advice import LONG, problems_of
from leaktight.audits.forecast import (
    Measured,
    check_defenses,
    crude_seconds,
    crude_training,
    measure,
    measure_training,
)
from leaktight.audits.plan import Experiment
from leaktight.audits.rehearsal import Load, attacked_load
from leaktight.fl.federation import Federation
from leaktight.inspections.forecast import crude_seconds as crude_inspection
from leaktight.inspections.forecast import measure_inspection
from leaktight.inspections.inspection import Inspection
from leaktight.results.forecast import Forecast, Problem
from leaktight.results.schema import SCHEMA_VERSION, Plain
from leaktight.runtime.processes import num_processes

BASIS = (
    "short pieces of the real work, timed on this machine and multiplied, on fewer examples and steps where there are "
    "many; attacks that end early take less"
)
DOUBTFUL = LONG / 4
"""Crudely guessed seconds from which on a plan is rehearsed before it runs."""


def forecast_audit(
    command: str,
    experiments: Sequence[Experiment],
    facts: Mapping[str, Plain],
    *,
    workers: int | str | None,
    budget: float | None,
) -> Forecast:
    """Rehearse an audit or a trade-off. workers: as in `leaktight.audit`. budget: minutes."""
    for each in experiments:
        check_defenses(each)
    measured = measure(experiments, whole=command == "tradeoff", processes=_processes(workers), preload=PRELOAD)
    load = max((attacked_load(each) for each in experiments), key=lambda each: each.passes)
    return _forecast(command, measured, facts, load, problems_of(measured, budget=budget))


def forecast_training(
    federation: Federation, defense: str, facts: Mapping[str, Plain], workers: int | None
) -> Forecast:
    """Rehearse a training run."""
    measured = measure_training(federation, defense, processes=num_processes(workers))
    return _forecast("train", measured, facts, Load(0, 0, 0), problems_of(measured))


def forecast_inspection(inspection: Inspection, facts: Mapping[str, Plain], workers: int | str | None) -> Forecast:
    """Rehearse an inspection."""
    measured = measure_inspection(inspection, processes=_processes(workers), preload=PRELOAD)
    return _forecast("inspect", measured, facts, measured.items[0].load, problems_of(measured))


def doubts_of_audit(
    command: str, experiments: Sequence[Experiment], *, workers: int | str | None, budget: float | None
) -> Sequence[Problem]:
    """The problems of a plan that seems long, for a warning before it runs; none for others, without a rehearsal."""
    whole, processes = command == "tradeoff", _processes(workers)
    if crude_seconds(experiments, whole=whole) / processes < DOUBTFUL:
        return ()
    return problems_of(measure(experiments, whole=whole, processes=processes, preload=PRELOAD), budget=budget)


def doubts_of_training(federation: Federation, defense: str, workers: int | None) -> Sequence[Problem]:
    """As `doubts_of_audit`, of a training run."""
    processes = num_processes(workers)
    if crude_training(federation, federation.plan.rounds) / processes < DOUBTFUL:
        return ()
    return problems_of(measure_training(federation, defense, processes=processes))


def doubts_of_inspection(inspection: Inspection, workers: int | str | None) -> Sequence[Problem]:
    """As `doubts_of_audit`, of an inspection."""
    processes = _processes(workers)
    if crude_inspection(inspection) / processes < DOUBTFUL:
        return ()
    return problems_of(measure_inspection(inspection, processes=processes, preload=PRELOAD))


def sentence(problem: Problem) -> str:
    """A problem with its changes, on one line."""
    changes = "; ".join(f"{each.setting} = {each.value}" for each in problem.changes)
    return f"{problem.what}; change {changes}" if changes else problem.what


def _processes(workers: int | str | None) -> int:
    """The number of processes of an option `workers`; those of a cluster count as those of this machine."""
    _, number = parse_workers(workers)
    return num_processes(number)


def _forecast(
    command: str, measured: Measured, facts: Mapping[str, Plain], load: Load, problems: Sequence[Problem]
) -> Forecast:
    return Forecast(
        schema_version=SCHEMA_VERSION,
        command=command,
        scenario=dict(facts),
        trials=(sum(item.least for item in measured.items), sum(item.most for item in measured.items)),
        training_rounds=sum(work.rounds for work in measured.trainings),
        examples=load.examples,
        local_steps=load.steps,
        example_uses=load.passes,
        trainings=tuple(measured.trainings),
        attacks=tuple(item.work() for item in measured.items),
        processes=measured.processes,
        seconds=measured.seconds,
        memory=measured.memory,
        rehearsal=measured.spent,
        basis=BASIS,
        problems=tuple(problems),
    )
