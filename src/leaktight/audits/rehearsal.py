"""A rehearsal of an experiment: short pieces of its real work, on fewer examples and steps, timed and extrapolated.

Processor time is measured, so that other programs on the machine do not count. An attack runs on the update of a small
local training until its time is up; what is left of it is extrapolated from its progress.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from leaktight.adaptive.auto import ENSEMBLES, MOST_SIMULATED, Auto, KnowingAuto
from leaktight.adaptive.knowing import Knowing
from leaktight.attacks.controls import Control
from leaktight.attacks.matching.attack import SHORT_SEARCHES, SHORTER, Matching
from leaktight.attacks.matching.orders import STARTS
from leaktight.attacks.matching.spread import among, choose
from leaktight.attacks.matching.view import Around, Matched, Simulation
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.attacks.presets.agic import Agic
from leaktight.attacks.presets.preset import Preset
from leaktight.audits.experiment import Played, TrialRunner
from leaktight.audits.plan import Experiment, TrialSpec
from leaktight.audits.trial import reason_of, without_update
from leaktight.core.errors import LeaktightError
from leaktight.core.faults import raise_fault
from leaktight.core.protocols import Attack
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.fl.local import Trainer, loss_and_gradient
from leaktight.models.surgery import mode_of

MOST_BATCH, MOST_STEPS = 32, 4
"""The largest local training of a rehearsal."""
STEP_SECONDS = 0.05
"""What a local step of a rehearsal may take; large networks have smaller batches."""


class Load(NamedTuple):
    """The work behind one update: its examples, local steps, how often an example is used in all of them, and the
    batches of an epoch."""

    examples: int
    steps: int
    passes: int
    batches: int = 1

    def times(self, clients: int) -> Load:
        return Load(self.examples * clients, self.steps, self.passes * clients, self.batches)


def load_of(local: LocalTraining, size: int) -> Load:
    """The work of a client with `size` examples.

    >>> load_of(LocalTraining(epochs=2, batch_size=4), 10)
    Load(examples=10, steps=6, passes=20, batches=3)
    """
    used = size if local.samples is None else min(local.samples, size)
    steps = local.num_steps(size)
    passes = local.epochs * used if local.steps is None else steps * min(local.batch_size, used)
    return Load(used, steps, passes, local.steps_per_epoch(size))


def attacked_load(experiment: Experiment) -> Load:
    """The work behind the largest attacked update."""
    clients = 1 if experiment.threat.sees == "client" else len(experiment.members(0))
    return load_of(experiment.attacked, max(experiment.federation.sizes.values())).times(clients)


def seconds_of_example(trainer: Trainer, batch: Batch) -> float:
    """The processor time of a gradient, for each example of a small batch."""
    params, buffers = parameters_of(trainer.model), buffers_of(trainer.model)
    times = []
    for _ in range(2):  # the first call also prepares kernels
        began = time.process_time()
        with mode_of(trainer.model, trainer.mode), global_seed(Rng(0)):
            loss_and_gradient(trainer, params, cloned(buffers), batch)  # batch norm updates buffers in place
        times.append(time.process_time() - began)
    return times[-1] / len(batch)


def shrunk(local: LocalTraining, size: int, seconds: float) -> LocalTraining:
    """A small part of a local training. size: the client's examples. seconds: of a gradient of one example."""
    load = load_of(local, size)
    fitting = max(2, int(STEP_SECONDS / max(seconds, 1e-9)))
    batch = min(local.batch_size, load.examples, MOST_BATCH, fitting)
    steps = min(load.steps, MOST_STEPS, max(1, fitting // batch))
    return replace(local, steps=steps, batch_size=batch, samples=min(load.examples, batch * steps))


class TimeUp(BaseException):
    """Ends a rehearsal; not an `Exception`, so that no attack takes it for a failure."""


class Watch:
    """A progress callback that counts reports and ends an attack after `limit` seconds of processor time."""

    def __init__(self, limit: float) -> None:
        self.limit, self.began = limit, time.process_time()
        self.count, self.first, self.last = 0, 0.0, 0.0

    def __call__(self, iteration: int, loss: float, guess: object) -> None:
        self.last = time.process_time() - self.began
        self.first = self.first or self.last
        self.count += 1
        if self.count > 2 and self.last > self.limit:
            raise TimeUp

    @property
    def rate(self) -> float:
        """The seconds of each report after the first."""
        return (self.last - self.first) / max(1, self.count - 1)

    def extrapolated(self, reports: float) -> float:
        """The seconds of this many reports."""
        return self.first + self.rate * max(0.0, reports - 1)


@dataclass(frozen=True)
class Rehearsed:
    """The seconds of one trial at the size of the plan. error: why the attack cannot run; None if it can.

    whole: the attack ran to its end, so nothing of it is extrapolated but its size.
    """

    play: float
    attack: float
    judge: float
    error: str | None = None
    whole: bool = True

    @property
    def seconds(self) -> float:
        return self.play + self.attack + self.judge


@dataclass(frozen=True)
class Rehearsal:
    """An experiment with small local training, to be timed. full: the experiment itself.

    known: the seconds of closed forms that were timed already, which are the same on every defense.
    """

    full: Experiment
    small: Experiment
    known: dict[Attack, float] = field(default_factory=dict)

    @classmethod
    def of(cls, experiment: Experiment) -> Rehearsal:
        federation = experiment.federation
        seconds = seconds_of_example(federation.trainer, federation.examples.batch(slice(0, 2)))
        local = shrunk(experiment.attacked, max(federation.sizes.values()), seconds)
        settings = replace(experiment.settings, trials=1)
        return cls(experiment, replace(experiment, attacked=local, settings=settings))

    def scale(self, *, simulated: bool) -> float:
        """How many times more work an update of the plan is: by the uses of examples, or by their number."""
        full, small = attacked_load(self.full), attacked_load(self.small)
        return full.passes / small.passes if simulated else full.examples / small.examples

    def run(self, spec: TrialSpec, *, limit: float, judge: float | None) -> Rehearsed:
        """Run a trial of the small experiment. limit: seconds of the attack. judge: those of scoring, if known."""
        runner, began = TrialRunner(self.small), time.process_time()
        try:
            scene = runner.scene(spec)
            played = runner.play(spec, scene)
            play = (time.process_time() - began) * self.scale(simulated=True)
            parts, found = self._attack(spec, played, limit)
            attack = sum(self._full(part, play) for part in parts) * _repeats(spec, played)
            if judge is None:
                began = time.process_time()
                runner.scored(spec, scene, played, [found])
                judge = (time.process_time() - began) * self.scale(simulated=False)
        except Exception as error:  # as in a trial, the attack or the defense is to blame
            raise_fault(error)
            return Rehearsed(0.0, 0.0, judge or 0.0, reason_of(error))
        return Rehearsed(play, attack, judge, None, all(part.whole for part in parts))

    def _attack(self, spec: TrialSpec, played: Played, limit: float) -> tuple[list[Part], Reconstruction]:
        """The timed parts of the attack, and a guess."""
        entry, given = spec.attack, deepcopy(played.given[0])
        if entry.role == "control":
            given = [without_update(each) for each in given]
        rng = self.small.rng(0).child("attack", entry.name).detached()
        parts, found = timed(entry.value, given, rng=rng, limit=limit, known=self.known)
        return parts, found or _blank(given[0])

    def _full(self, part: Part, play: float) -> float:
        """The seconds of a part of an attack at the size of the plan. play: those of a round."""
        load = attacked_load(self.full)
        scale = self.scale(simulated=simulates(part.attack, load.steps))
        return part.seconds * scale + settling(part, load, play, scale)


def _repeats(spec: TrialSpec, played: Played) -> int:
    """How often an attack runs in a trial: for each of several updates, or for each draw of a control."""
    return len(played.given) * (spec.attack.value.draws if isinstance(spec.attack.value, Control) else 1)


class Part(NamedTuple):
    """A timed attack, or a member of an ensemble. first: seconds until its first report. rate: of each further one.

    whole: it ran to its end; otherwise its seconds are extrapolated.
    """

    attack: Attack
    seconds: float
    first: float = 0.0
    rate: float = 0.0
    whole: bool = True


def timed(
    attack: Attack, seen: Sequence[Observation], *, rng: Rng, limit: float, known: dict[Attack, float] | None = None
) -> tuple[list[Part], Reconstruction | None]:
    """The processor time of an attack, extrapolated if it takes more than `limit` seconds; its guess, or None.

    Orders of examples are not compared; see `settling`. known: the seconds of closed forms, looked up and added to.
    """
    known = {} if known is None else known
    members = _members(attack, seen[0])
    parts: list[Part] = []
    errors: list[LeaktightError] = []
    found = None
    for each in members:
        if each in known:
            parts.append(Part(each, known[each]))
            continue
        shown, watch = list(seen if each.joins_rounds else seen[-1:]), Watch(limit / len(members))
        try:
            with among(0):  # compiling takes longer than a rehearsal
                found = _in_one_order(each).reconstruct(shown, rng=rng, progress=watch)
            parts.append(Part(each, time.process_time() - watch.began, watch.first, watch.rate))
        except TimeUp:
            seconds = max(watch.last, watch.extrapolated(reports_of(each, shown, rng)))
            parts.append(Part(each, seconds, watch.first, watch.rate, whole=False))
        except LeaktightError as error:
            raise_fault(error)
            errors.append(error)
            continue
        if not each.searches and len(members) > 1:
            known[each] = parts[-1].seconds
    if len(errors) == len(members):
        raise errors[0]
    return parts, found


def settling(part: Part, load: Load, play: float, scale: float) -> float:
    """The seconds in which an attack settles on an order of the examples over the steps, before its search.

    play: those of the client's training. scale: how many times more work the update is than that of the rehearsal.
    """
    matching = matching_of(part.attack)
    if matching is None or load.batches == 1 or not simulates(part.attack, load.steps):
        return 0.0
    sizes = [load.examples // load.batches] * load.batches
    epochs = max(1, load.steps // load.batches)
    several = epochs * (math.lgamma(load.examples + 1) - sum(math.lgamma(size + 1) for size in sizes))
    most = math.log(_simulation(matching.matched).orders)
    number, starts = round(math.exp(min(several, most))), STARTS if several <= most else 1
    short = max(1, matching.iterations // SHORTER) * _reports_per_iteration(matching)
    return number * starts * play + min(number, SHORT_SEARCHES) * (part.first + short * part.rate) * scale


def _simulation(matched: Matched) -> Simulation:
    while isinstance(matched, Around):
        matched = matched.inner
    return matched if isinstance(matched, Simulation) else Simulation(orders=1)


def _in_one_order(attack: Attack) -> Attack:
    """The attack without its comparison of orders, where it has one."""
    if isinstance(attack, Knowing):
        inner = _in_one_order(attack.attack)
        return replace(attack, attack=inner) if isinstance(inner, Preset | Matching) else attack
    composed = attack.composition() if isinstance(attack, Preset) else attack
    if not isinstance(composed, Matching):
        return attack
    return replace(composed, matched=_one_order(composed.matched))


def _one_order(matched: Matched) -> Matched:
    if isinstance(matched, Around):
        return replace(matched, inner=_one_order(matched.inner))
    return replace(matched, orders=1) if isinstance(matched, Simulation) else matched


def _members(attack: Attack, seen: Observation) -> list[Attack]:
    """The attacks of an ensemble; else the attack alone."""
    if isinstance(attack, Auto):
        blind = replace(seen, labels=None) if attack.labels == "inferred" else seen
        return [each for _, each in attack.members(blind, None)]
    if isinstance(attack, KnowingAuto):
        return [each for _, each in attack.auto.members(seen, attack.adaptation)]
    return [attack]


def matching_of(attack: Attack) -> Matching | None:
    """The composition behind an attack, if it has one."""
    if isinstance(attack, Matching):
        return attack
    return attack.matching() if isinstance(attack, Preset | Knowing) else None


def simulates(attack: Attack, steps: int) -> bool:
    """Whether an attack computes all local steps of a guess, and not one step for all of them."""
    if isinstance(attack, Auto | KnowingAuto):
        return steps <= MOST_SIMULATED
    matching = matching_of(attack)
    if matching is None or isinstance(attack, Agic):
        return False
    matched = matching.matched
    while isinstance(matched, Around):
        matched = matched.inner
    return isinstance(matched, Simulation)


def steps_of(attack: Attack) -> int:
    """How often an attack evaluates what it minimises, over all restarts; 1 for a closed form."""
    if isinstance(attack, Auto | KnowingAuto):
        auto = attack if isinstance(attack, Auto) else attack.auto
        return sum(steps_of(each) for each in ENSEMBLES[auto.budget].values())
    matching = matching_of(attack)
    return 1 if matching is None else matching.workload.steps * matching.restarts


def reports_of(attack: Attack, seen: Sequence[Observation], rng: Rng) -> float:
    """How often an attack reports its progress, if it does not end early."""
    matching = matching_of(attack)
    if matching is None:
        told: int = getattr(attack, "candidates", 0) or getattr(attack, "iterations", 0)
        return told
    each, latent = _reports_per_iteration(matching), getattr(attack, "latent_iterations", 0)
    times = matching.restarts
    if times > 1:
        way, _ = choose(matching.workload, matching.evidence(seen, rng=rng), matching.parallel, 1)
        times = 1 if way == "vmap" else times
    if matching.rough_iterations:
        return (times * matching.rough_iterations + matching.iterations) * each
    return times * (matching.iterations * each + latent)


def _reports_per_iteration(matching: Matching) -> int:
    """L-BFGS reports every evaluation."""
    return matching.optimizer.steps_per_iteration if isinstance(matching.optimizer, Lbfgs) else 1


def _blank(seen: Observation) -> Reconstruction:
    """A guess to be judged in the place of one that was not waited for."""
    number = seen.batch_size or 1
    targets = seen.task.blind_targets(number, seen.num_classes, Rng(0).public())
    return Reconstruction(Batch(torch.zeros(number, *seen.inputs.shape), targets), 0.0)
