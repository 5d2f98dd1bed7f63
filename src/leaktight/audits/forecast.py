"""The forecast of a plan: its trials, training rounds and examples, and estimates of its time and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module

import torch

from leaktight.attacks.optimizers.compile import make_runnable
from leaktight.audits.footprint import resident_bytes, search_bytes
from leaktight.audits.plan import AttackEntry, Entry, Experiment
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
from leaktight.core.faults import raise_fault
from leaktight.core.protocols import Defense
from leaktight.core.types import Broadcast
from leaktight.fl.federation import Federation
from leaktight.fl.local import evaluate
from leaktight.fl.messages import Train
from leaktight.results.forecast import AttackWork, Memory, TrainingWork
from leaktight.runtime.processes import Alone

SECONDS = 4.0
"""The processor time after which no attack is rehearsed if one alike was."""
LIMIT = 0.4
"""The processor time of one attack in a rehearsal."""
SCORED = 64
"""The test examples on which scoring a model is timed."""
DOUBLE = 4
"""A step of a search takes about so many times a gradient of the network."""
PRELOAD = (  # modules that trials import late: for scores, matching, traced graphs
    "scipy.optimize",
    "torch._functorch.compile_utils",
    "torch.fx.experimental.proxy_tensor",
    "torchmetrics.functional.image",
)


@dataclass(frozen=True)
class Item:
    """The trials of one attack, on all defenses it meets. least, most: their number. alike: timed on another attack."""

    experiment: Experiment
    entry: AttackEntry
    least: int
    most: int
    cost: Rehearsed
    alike: bool = False

    @property
    def simulated(self) -> bool:
        return simulates(self.entry.value, attacked_load(self.experiment).steps)

    def work(self) -> AttackWork:
        entry, cost = self.entry, self.cost
        return AttackWork(
            track=self.experiment.track,
            attack=entry.name,
            against=entry.against,
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

    def total(
        self, *, least: bool, trial: Callable[[Item], float] | None = None, number: Callable[[int], float] = float
    ) -> float:
        """The seconds of the plan. trial: of one trial of an item. number: changes the number of trials."""
        each = trial or (lambda item: item.cost.seconds)
        trials = sum(number(item.least if least else item.most) * each(item) for item in self.items)
        training = sum(
            work.rounds * work.clients * work.seconds / min(self.processes, work.clients) for work in self.trainings
        )
        return self.start + training + trials / self.processes

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


def measure(experiments: Sequence[Experiment], *, whole: bool, processes: int) -> Measured:
    """Rehearse the trials and the training of these experiments. whole: all rounds of the first one are trained."""
    began = time.process_time()
    for name in PRELOAD:
        import_module(name)
    with Alone().start(_nothing):
        make_runnable(lambda tensor: (tensor + 1,), [torch.ones(1)], "fx", False)  # the first trace is slow
        start, base = time.process_time(), resident_bytes()
        items = [item for each in experiments for item in _items(each, experiments, began)]
        trainings = [work for each in experiments for work in _trainings(each, whole=whole and each is experiments[0])]
        peak = max((search_bytes(item.experiment, item.entry.value) for item in items), default=0)
    return Measured(items, trainings, start, time.process_time() - began, base, peak, processes)


def _nothing(job: object, tell: object) -> None:
    """No work: a rehearsal runs as in a worker, and sends it nothing."""


def _items(experiment: Experiment, experiments: Sequence[Experiment], began: float) -> list[Item]:
    """The attacks of an experiment with their costs; attacks that know no defense first."""
    rehearsal = Rehearsal.of(experiment)
    first = set(wanted(experiments, {}).ids)
    judge: dict[str, float] = {}
    items: list[Item] = []
    for entry in sorted(experiment.attacks, key=lambda each: each.adaptive):
        own = [spec for spec in experiment.trials if spec.attack == entry]
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
        items.append(Item(experiment, entry, sum(each.id in first for each in own), len(own), cost, late))
    return items


def _trainings(experiment: Experiment, *, whole: bool) -> list[TrainingWork]:
    if not (experiment.trains or whole):
        return []
    rounds = experiment.federation.plan.rounds if whole else experiment.rounds[-1]
    return [training_work(experiment.trained(each), each.name, rounds, experiment) for each in experiment.defenses]


def training_work(
    federation: Federation, defense: str, rounds: int, experiment: Experiment | None = None
) -> TrainingWork:
    """The work of a training, from a short training of one client and the scoring of a few examples."""
    local, sizes = federation.trainer.local, list(federation.sizes.values())
    name, largest = max(federation.sizes.items(), key=lambda each: each[1])
    small = shrunk(local, largest, seconds_of_example(federation))
    reduced = federation.with_trainer(local=small)
    clients = federation.plan.per_round or len(sizes)
    state = reduced.first_state().server
    broadcast = Broadcast(state.params, state.buffers, 0, reduced.trainer.model)
    request = Train(broadcast, small.learning_rate, reduced.setup.aggregator.update_kind, 1.0)
    began = time.process_time()
    reduced.client(name).train_round(request, None)
    loads = [load_of(local, size) for size in sizes]
    average = Load(*(round(sum(column) / len(loads)) for column in zip(*loads, strict=True)))
    seconds = (time.process_time() - began) * average.passes / load_of(small, largest).passes
    seconds += _scoring(federation) / clients
    return TrainingWork(
        track=experiment.track if experiment else "diagnostic",
        defense=defense,
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


def defenses_that_fail(experiment: Experiment) -> dict[str, str]:
    """By defense, why a client cannot start with it on this network."""
    failed = {}
    for each in experiment.defenses:
        try:
            started(experiment, each)
        except Exception as error:
            raise_fault(error)
            failed[each.name] = str(error) or type(error).__name__
    return failed


def started(experiment: Experiment, defense: Entry[Defense]) -> None:
    """Start a client with this defense, as for an attacked round."""
    federation = experiment.attacked_federation(defense.value, 0)
    client = federation.client(experiment.victim(0))
    defense.value.start(federation.trainer.model, client.facts, rng=client.rng.child("rehearsal"))


def crude_seconds(experiments: Sequence[Experiment], *, whole: bool) -> float:
    """A quick guess of the seconds of a plan in one process, from one gradient of each network."""
    total = 0.0
    for each in experiments:
        step, load = seconds_of_example(each.federation), attacked_load(each)
        first = set(wanted(experiments, {}).ids)
        for spec in (spec for spec in each.trials if spec.id in first):
            uses = load.passes if simulates(spec.attack.value, load.steps) else load.examples
            total += step * DOUBLE * uses * steps_of(spec.attack.value)
        if each.trains or whole:
            rounds = each.federation.plan.rounds if whole else each.rounds[-1]
            sizes = each.federation.sizes.values()
            clients = each.federation.plan.per_round or len(sizes)
            uses = max(load_of(each.federation.trainer.local, size).passes for size in sizes)
            total += len(each.defenses) * rounds * clients * uses * step
    return total
