"""How the work of an attack is spread: victims and restarts side by side under vmap, over processes, or in turn.

All ways find the same, up to the rounding of floats: every restart of every victim has random streams of its own and
stops by itself. Only a network that draws random numbers itself (dropout) comes out differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from leaktight.attacks.matching.alike import groups
from leaktight.attacks.matching.problem import Found, Problem, Search, VictimProgress
from leaktight.attacks.optimizers.derivative_free import ask_and_tell
from leaktight.attacks.optimizers.descent import FirstOrder
from leaktight.attacks.optimizers.first_order import descend
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.attacks.optimizers.second_order import bend
from leaktight.core.rng import Rng, global_seed
from leaktight.models.surgery import mode_of
from leaktight.runtime.executor import Tell
from leaktight.runtime.processes import available_cores, in_worker, run_all

if TYPE_CHECKING:
    from leaktight.attacks.matching.attack import Matching

Parallel: TypeAlias = Literal["auto", "vmap", "processes", "none"]

LANES = 8
"""How many restarts of victims are one traced function; fixed, so that no bit depends on the number of processes."""

# Measured on two cores: vmap gains 1.4 to 2.2 times below both bounds, and loses above 600 000 parameters, whose
# gradients per lane no cache holds. From `_QUICK` on, two processes gain more than vmap.
_FEW_PARAMETERS, _FEW_FLOPS, _QUICK = 3e5, 1e8, 2e7
_SECONDS_PER_STEP, _SECONDS_PER_FLOP = 2e-3, 3e-10
_WORTH_SECONDS = 10.0  # starting processes takes some seconds


@dataclass(frozen=True)
class Job:
    """Some restarts of some victims. places: which victims these are among all."""

    attack: Matching
    places: Sequence[int]
    problems: Sequence[Problem]
    rngs: Sequence[Rng]
    restarts: Sequence[int]
    together: bool
    watched: bool


def search(job: Job, tell: Tell[tuple[int, int, float, Tensor | None]]) -> list[Found]:
    """What a job's restarts found, by victim."""

    def progress(victim: int, iteration: int, loss: float, guess: Tensor | None) -> None:
        tell((job.places[victim], iteration, loss, guess))

    run = Search(job.attack, job.problems, job.rngs, job.restarts, progress if job.watched else None)
    with global_seed(job.rngs[0].child("network")):
        if isinstance(job.attack.optimizer, FirstOrder):
            return descend(run, job.together)
        return bend(run) if isinstance(job.attack.optimizer, Lbfgs) else ask_and_tell(run)


def search_all(
    attack: Matching,
    problems: Iterable[Problem],
    rngs: Sequence[Rng],
    *,
    workers: int | None,
    progress: VictimProgress | None,
    done: Callable[[int, Problem, Found], None],
) -> None:
    """Search for all victims; `done` is called with the place of each, when its last restart has come in.

    problems: one for each of `rngs`, taken as they are needed. workers: how many processes there may be; None: one for
    every core, and none where this is such a process itself.
    """
    waiting = iter(problems)
    first = next(waiting)
    way, number = choose(attack, first, len(rngs), 1 if in_worker() else workers or available_cores())
    spread = _Spread(attack, way, rngs, progress, done)
    run_all(search, spread.jobs(chain([first], waiting)), workers=number, told=spread.tell, done=spread.collect)


def choose(attack: Matching, problem: Problem, victims: int, workers: int) -> tuple[Parallel, int]:
    """The way to spread the work on so many victims like this one, and the number of processes."""
    lanes = victims * attack.restarts
    if lanes == 1 or attack.parallel == "none":
        return "none", 1
    if attack.parallel == "processes":
        return "processes", workers
    flops = flops_of(problem)
    optimizer = attack.optimizer
    steps = attack.iterations * (1 if isinstance(optimizer, FirstOrder) else optimizer.steps_per_iteration)
    seconds = lanes * steps * (_SECONDS_PER_STEP + _SECONDS_PER_FLOP * flops)
    number = workers if seconds > _WORTH_SECONDS else 1
    if attack.parallel == "vmap":
        return "vmap", number
    parameters = max(sum(tensor.numel() for tensor in view.params.values()) for _, view, _ in problem.views)
    abreast = isinstance(attack.optimizer, FirstOrder) and parameters <= _FEW_PARAMETERS and flops <= _FEW_FLOPS
    abreast = abreast and attack.sought.abreast
    apart = number > 1 and (victims > 1 or attack.separable)
    if apart and not (abreast and flops <= _QUICK):
        return "processes", number
    return ("vmap", number) if abreast else ("none", 1)


def flops_of(problem: Problem) -> float:
    """What one forward pass over all examples of a guess costs, with every simulated step."""
    total = 0.0
    for _, view, places in problem.views:
        model = view.trainer.model
        inputs = next(iter(view.params.values())).new_zeros(len(places), *problem.shape)
        with FlopCounterMode(display=False) as counter, torch.no_grad(), mode_of(model, view.trainer.mode):
            functional_call(model, (dict(view.params), dict(view.buffers)), (inputs,))
        seen = sum(len(step) for step, _ in view.steps) / len(places) if view.steps else 1.0
        total += counter.get_total_flops() * seen
    return total


class _Spread:
    """Makes the jobs, and puts together what comes back."""

    def __init__(
        self,
        attack: Matching,
        way: Parallel,
        rngs: Sequence[Rng],
        progress: VictimProgress | None,
        done: Callable[[int, Problem, Found], None],
    ) -> None:
        self.attack, self.way, self.rngs, self.progress, self.done = attack, way, rngs, progress, done
        numbers = range(attack.restarts)
        self.restarts = [[number] for number in numbers] if way == "processes" and attack.separable else [list(numbers)]
        self.places: list[Sequence[int]] = []
        self.kept: dict[int, Problem] = {}
        self.parts: dict[int, dict[int, Found]] = {}
        self.best: dict[int, tuple[float, Tensor | None]] = {}

    def jobs(self, problems: Iterable[Problem]) -> Iterator[Job]:
        for places, chosen in self._batches(problems):
            self.kept |= zip(places, chosen, strict=True)
            for restarts in self.restarts:
                self.places.append(places)
                rngs = [self.rngs[place] for place in places]
                together = self.way == "vmap"
                yield Job(self.attack, places, chosen, rngs, restarts, together, self.progress is not None)

    def _batches(self, problems: Iterable[Problem]) -> Iterator[tuple[list[int], list[Problem]]]:
        if self.way != "vmap":
            for place, problem in enumerate(problems):
                yield [place], [problem]
            return
        every = list(problems)
        for places in groups(every, max(1, LANES // self.attack.restarts)):
            yield places, [every[place] for place in places]

    def tell(self, job: int, message: tuple[int, int, float, Tensor | None]) -> None:
        """Pass on a report; where a victim's restarts are apart, always with the best guess of all so far."""
        place, iteration, loss, guess = message
        if len(self.restarts) > 1:
            loss, guess = min(self.best.get(place, (loss, guess)), (loss, guess), key=lambda known: known[0])
            self.best[place] = loss, guess
        if self.progress is not None:
            self.progress(place, iteration, loss, guess)

    def collect(self, job: int, found: Sequence[Found]) -> None:
        for place, part in zip(self.places[job], found, strict=True):
            parts = self.parts.setdefault(place, {})
            parts[job] = part
            if len(parts) == len(self.restarts):
                candidates = [candidate for number in sorted(parts) for candidate in parts[number].candidates]
                self.done(place, self.kept.pop(place), replace(part, candidates=candidates))
