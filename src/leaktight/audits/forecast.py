"""The forecast of a plan: its trials, training rounds and examples, and estimates of its time and memory."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch

from leaktight.attacks.optimizers.compile import make_runnable
from leaktight.audits.footprint import bytes_of, resident_bytes, search_bytes
from leaktight.audits.plan import AttackEntry, Experiment
from leaktight.audits.rehearsal import (
    Load,
    Rehearsal,
    Rehearsed,
    attacked_load,
    load_of,
    seconds_of_example,
    shrunk,
    simulates,
    steps_of,
)
from leaktight.audits.schedule import wanted
from leaktight.audits.states import training_folder
from leaktight.audits.trial import reason_of
from leaktight.core.errors import UsageError
from leaktight.core.faults import raise_fault
from leaktight.core.protocols import Attack
from leaktight.engines import inprocess
from leaktight.fl.federation import Federation
from leaktight.fl.local import evaluate
from leaktight.results.folder import RunFolder
from leaktight.results.forecast import AttackWork, Memory, TrainingWork
from leaktight.results.schema import Plain, Track, Trial
from leaktight.runtime.processes import Alone

SECONDS = 4.0
"""The processor time after which no attack is rehearsed if one alike was."""
LIMIT = 0.4
"""The processor time of one attack in a rehearsal."""
SCORED = 64
"""The test examples on which scoring a model is timed."""
Named: TypeAlias = tuple[str, Mapping[str, Any]]
"""A defense: its name and its settings."""
DOUBLE = 4
"""A step of a search takes about so many times a gradient of the network."""


@dataclass(frozen=True)
class Item:
    """The trials of one attack, on all defenses it meets. load: the work behind the attacked update.

    batch: its batch size, None if it cannot be changed. victims: in the first look. least, most: trials. alike: it was
    not timed, but another form of it. known: the settings of the defense that it is adapted to.
    """

    track: Track
    entry: AttackEntry
    load: Load
    batch: int | None
    victims: int
    least: int
    most: int
    cost: Rehearsed
    alike: bool = False
    known: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        return simulates(self.entry.value, self.load.steps)

    def work(self) -> AttackWork:
        entry, cost = self.entry, self.cost
        return AttackWork(
            track=self.track,
            attack=entry.name,
            against=entry.against,
            against_settings=dict(self.known),
            role=entry.role,
            trials=(self.least, self.most),
            seconds=cost.seconds,
            measured="not" if cost.error else "alike" if self.alike else "whole" if cost.whole else "part",
            error=cost.error,
        )


@dataclass(frozen=True)
class Measured:
    """The parts of a plan with their costs. start: the seconds until a process can work. spent: those of measuring.

    base: the bytes of a process without an attack. peak: those that the largest attack adds.
    """

    items: Sequence[Item]
    trainings: Sequence[TrainingWork]
    start: float
    spent: float
    base: int
    peak: int
    processes: int

    @property
    def seconds(self) -> tuple[float, float]:
        return self.total(least=True), self.total(least=False)

    def total(self, *, least: bool) -> float:
        """The seconds of the plan, with the least or the most trials."""
        numbers = [item.least if least else item.most for item in self.items]
        trials = sum(number * item.cost.seconds for number, item in zip(numbers, self.items, strict=True))
        training = sum(
            work.rounds * work.clients * work.seconds / min(self.processes, work.clients) for work in self.trainings
        )
        return self.start + training + trials / max(1, min(self.processes, sum(numbers)))

    @property
    def memory(self) -> Memory:
        process = self.base + self.peak
        alone = self.processes == 1
        return Memory(
            process=process, total=process if alone else self.base + self.processes * process, machine=machine_bytes()
        )


def machine_bytes() -> int | None:
    """The memory of the machine."""
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def measure(
    experiments: Sequence[Experiment],
    *,
    whole: bool,
    processes: int,
    preload: Sequence[str],
    finished: Mapping[str, Trial] | None = None,
    held: Path | None = None,
) -> Measured:
    """Rehearse the trials and the training of these experiments.

    whole: all rounds of the first one are trained. preload: modules that a worker imports. finished: trials that are
    not counted, by id. held: the folder of a run, whose trained rounds are not counted.
    """
    with rehearsing(processes, preload) as note:
        note.items = [item for each in experiments for item in _items(each, experiments, note.began, finished or {})]
        note.trainings = [
            work for each in experiments for work in _trainings(each, whole and each is experiments[0], held)
        ]
        note.peak = max(_peak(each, note.items) for each in experiments)
    return note.measured()


def measure_training(federation: Federation, defense: Named, *, processes: int, held: Path | None = None) -> Measured:
    """Rehearse a training run. held: its folder, whose trained rounds are not counted."""
    with rehearsing(processes, ()) as note:
        rounds = federation.plan.rounds - _trained(held)
        note.trainings = [training_work(federation, defense, rounds)] if rounds > 0 else []
    return note.measured()


@dataclass
class Notes:
    """What a rehearsal finds out while it runs; see `Measured`. began: in processor time."""

    processes: int
    began: float
    start: float = 0.0
    base: int = 0
    peak: int = 0
    items: Sequence[Item] = ()
    trainings: Sequence[TrainingWork] = ()

    def measured(self) -> Measured:
        spent = time.process_time() - self.began
        return Measured(self.items, self.trainings, self.start, spent, self.base, self.peak, self.processes)


@contextmanager
def rehearsing(processes: int, preload: Sequence[str]) -> Iterator[Notes]:
    """Work as a worker process does, with all imports done and noted as the time to start."""
    notes = Notes(processes, time.process_time())
    for name in preload:
        import_module(name)
    with Alone().start(_nothing), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run will say them
        if preload:
            make_runnable(lambda tensor: (tensor + 1,), [torch.ones(1)], "fx", False)  # the first trace is slow
        notes.start, notes.base = time.process_time(), resident_bytes()
        yield notes


def _peak(experiment: Experiment, items: Sequence[Item]) -> int:
    federation = experiment.federation
    costs = bytes_of(federation.trainer, federation.examples.batch(slice(0, 4)))
    own = [item for item in items if item.track == experiment.track]
    return max((search_bytes(item.entry.value, item.load, costs) for item in own), default=0)


def _nothing(job: object, tell: object) -> None:
    """No work: a rehearsal runs as in a worker, and sends it nothing."""


def _items(
    experiment: Experiment, experiments: Sequence[Experiment], began: float, finished: Mapping[str, Trial]
) -> list[Item]:
    """The attacks of an experiment with their costs; attacks that know no defense first."""
    rehearsal = Rehearsal.of(experiment)
    first = set(wanted(experiments, finished).ids)
    settings = {each.name: each.settings for each in experiment.defenses}
    judge: dict[str, float] = {}
    items: list[Item] = []
    for entry in sorted(experiment.attacks, key=lambda each: each.adaptive):
        own = [spec for spec in experiment.trials if spec.attack == entry and spec.id not in finished]
        if not own:
            continue
        alike = next((each.cost for each in items if each.entry.name == entry.name and not each.cost.error), None)
        late = alike is not None and time.process_time() - began > SECONDS
        if late and alike is not None:
            cost = alike
        else:
            spec = next(each for each in rehearsal.small.trials if each.attack == entry)
            cost = rehearsal.run(spec, limit=LIMIT, judge=judge.get(entry.role))
            if cost.error is None:
                judge.setdefault(entry.role, cost.judge)
        items.append(
            Item(
                experiment.track,
                entry,
                attacked_load(experiment),
                experiment.attacked.batch_size,
                experiment.settings.looks[0],
                sum(each.id in first for each in own),
                len(own),
                cost,
                late,
                settings.get(entry.against or "", {}),
            )
        )
    return items


def _trainings(experiment: Experiment, whole: bool, held: Path | None) -> list[TrainingWork]:
    if not (experiment.trains or whole):
        return []
    rounds = experiment.federation.plan.rounds if whole else experiment.rounds[-1]
    works = []
    for each in experiment.defenses:
        left = rounds - _trained(held and training_folder(experiment, held, each.name))
        if left > 0:
            defense = each.name, each.settings
            works.append(training_work(experiment.trained(each), defense, left, experiment.track))
    return works


def _trained(folder: Path | None) -> int:
    """The rounds of the training in this folder."""
    return max(RunFolder(folder).checkpoints, default=0) if folder else 0


def training_work(federation: Federation, defense: Named, rounds: int, track: Track = "diagnostic") -> TrainingWork:
    """The work of a training, from a short training of one client and the scoring of a few examples."""
    local, sizes = federation.trainer.local, list(federation.sizes.values())
    name, largest = max(federation.sizes.items(), key=lambda each: each[1])
    small = shrunk(local, largest, _step(federation))
    clients = federation.plan.per_round or len(sizes)
    plan = replace(federation.plan, min_clients=None, rounds=1)
    reduced = replace(federation.with_trainer(local=small), plan=plan, drawn=(name,))
    began = time.process_time()
    try:
        inprocess.run(reduced, workers=1, until=1, score=False)
    except Exception as error:
        raise_fault(error)
        raise UsageError(f"training with the defense {defense[0]} fails: {reason_of(error)}") from error
    loads = [load_of(local, size) for size in sizes]
    average = Load(*(round(sum(column) / len(loads)) for column in zip(*loads, strict=True)))
    seconds = (time.process_time() - began) * average.passes / load_of(small, largest).passes
    seconds += _scoring(federation) / clients
    return TrainingWork(
        track=track,
        defense=defense[0],
        defense_settings=dict(defense[1]),
        rounds=rounds,
        clients=clients,
        steps=average.steps,
        examples=average.passes,
        seconds=seconds,
    )


def _scoring(federation: Federation) -> float:
    """The seconds of scoring a model after a round."""
    test, state = federation.dataset.test, federation.first_state().server
    number = min(SCORED, len(test))
    if not number:
        return 0.0
    began = time.process_time()
    evaluate(federation.trainer, state.params, state.buffers, test.part(0, number))
    return (time.process_time() - began) * len(test) / number


def check_defenses(experiment: Experiment) -> None:
    """Raise UsageError if a client cannot start with one of the defenses on this network."""
    for each in experiment.defenses:
        federation = experiment.attacked_federation(each.value, 0)
        client = federation.client(experiment.victim(0))
        try:
            each.value.start(copy.deepcopy(federation.trainer.model), client.facts, rng=client.rng.child("rehearsal"))
        except Exception as error:
            raise_fault(error)
            raise UsageError(f"the defense {each.name} cannot start on this network: {reason_of(error)}") from error


def crude_seconds(experiments: Sequence[Experiment], *, whole: bool) -> float:
    """A quick guess of the seconds of a plan in one process, from one gradient of each network."""
    first, total = set(wanted(experiments, {}).ids), 0.0
    for each in experiments:
        step, load = _step(each.federation), attacked_load(each)
        attacks = [spec.attack.value for spec in each.trials if spec.id in first]
        total += sum(crude_attack(attack, load, step) for attack in attacks)
        if each.trains or whole:
            rounds = each.federation.plan.rounds if whole else each.rounds[-1]
            total += len(each.defenses) * crude_training(each.federation, rounds)
    return total


def crude_attack(attack: Attack, load: Load, step: float) -> float:
    """A guess of the seconds of an attack. step: those of a gradient of one example."""
    uses = load.passes if simulates(attack, load.steps) else load.examples
    return step * DOUBLE * uses * steps_of(attack)


def crude_training(federation: Federation, rounds: int) -> float:
    """A guess of the seconds of a training in one process."""
    sizes = federation.sizes.values()
    uses = max(load_of(federation.trainer.local, size).passes for size in sizes)
    return rounds * (federation.plan.per_round or len(sizes)) * uses * _step(federation)


def _step(federation: Federation) -> float:
    return seconds_of_example(federation.trainer, federation.examples.batch(slice(0, 2)))
