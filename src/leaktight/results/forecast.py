"""The document of a dry run: what a plan does, how long that takes and how much memory, and what to change."""

from __future__ import annotations

from typing import Literal

from leaktight.results.schema import Plain, Record, Role, Track


class TrainingWork(Record):
    """A training. clients: in a round. steps, examples: of the average client in a round, with repetitions.

    seconds: of one client in a round, with its share of scoring the model.
    """

    track: Track
    defense: str
    rounds: int
    clients: int
    steps: int
    examples: int
    seconds: float


class AttackWork(Record):
    """The trials of an attack. against: the defense that it is adapted to. trials: at least and at most.

    seconds: of one trial. measured: the "whole" attack was run, a "part" of it, or one that is "alike" (on an update of
    fewer examples and steps where there are many). error: why the attack cannot run.
    """

    track: Track
    attack: str
    against: str | None
    role: Role
    trials: tuple[int, int]
    seconds: float
    measured: Literal["whole", "part", "alike", "not"]
    error: str | None = None


class Memory(Record):
    """In bytes: of one process, of all together, and of the machine (None if unknown)."""

    process: int
    total: int
    machine: int | None


class Change(Record):
    """A change of the plan. setting: in a config, or an option. seconds: of the plan with this and earlier changes."""

    setting: str
    value: str
    seconds: float


class Problem(Record):
    """Why a plan does not end in reasonable time, does not fit into memory, or fails; and changes that help."""

    what: str
    changes: tuple[Change, ...] = ()


class Forecast(Record):
    """The forecast of a plan. Times are estimates in seconds, for processes that have a core each.

    trials, seconds: at least and at most. training_rounds: of all trainings together. examples, local_steps: behind the
    largest attacked update; example_uses: how often an example is used in its steps. rehearsal: the processor time of
    the measurement. basis: what the estimate rests on, in words.
    """

    schema_version: int
    command: str
    scenario: dict[str, Plain]
    trials: tuple[int, int]
    training_rounds: int
    examples: int
    local_steps: int
    example_uses: int
    trainings: tuple[TrainingWork, ...]
    attacks: tuple[AttackWork, ...]
    processes: int
    seconds: tuple[float, float]
    memory: Memory
    rehearsal: float
    basis: str
    problems: tuple[Problem, ...]
