"""First-order search: restarts run side by side, and a whole iteration is one traced function."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils import _pytree as pytree

from leaktight.attacks.optimizers.compile import make_runnable
from leaktight.attacks.optimizers.form import form_of
from leaktight.attacks.optimizers.optimizer import (
    Candidate,
    Monitor,
    OnStep,
    Optimizer,
    Problem,
    SearchResult,
    Tree,
    channels_last,
)
from leaktight.core.devices import moved
from leaktight.core.errors import require_above, require_at_least

Variables: TypeAlias = Mapping[str, Tensor]
"""The tensors that a search moves, by name."""

Decay: TypeAlias = Literal["constant", "steps", "cosine"]

_DECAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "steps": lambda share: 0.1 ** sum(share >= milestone for milestone in (3 / 8, 5 / 8, 7 / 8)),
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
}
_CONSENSUS_FROM, _CONSENSUS_EVERY = 500, 100


@dataclass(frozen=True, kw_only=True)
class FirstOrder(Optimizer):
    """An optimiser that uses gradients; a subclass defines the step.

    learning_rate: > 0. decay: the learning rate is "constant", falls by "steps" to a tenth at 3/8, 5/8 and 7/8 of the
    iterations, or falls as a "cosine". warm_up: iterations in which it rises to its full value.
    langevin: standard deviation of the noise added in every step, in units of the learning rate.
    """

    abreast: ClassVar[bool] = True

    learning_rate: float = 0.1
    decay: Decay = "constant"
    warm_up: int = 0
    langevin: float = 0.0

    def __post_init__(self) -> None:
        require_above(0, learning_rate=self.learning_rate)
        require_at_least(0, warm_up=self.warm_up, langevin=self.langevin)

    def rate(self, iteration: int, iterations: int) -> float:
        """The learning rate of one iteration."""
        rate = self.learning_rate * _DECAYS[self.decay](iteration / iterations)
        return rate * (iteration + 1) / self.warm_up if iteration < self.warm_up else rate

    @abstractmethod
    def rates(self, iteration: int, iterations: int) -> tuple[float, ...]:
        """The numbers that change from step to step; the learning rate is the first."""

    @abstractmethod
    def memory(self, variables: Variables) -> dict[str, Tensor]:
        """The state before the first step."""

    @abstractmethod
    def step(
        self, variables: Variables, gradient: Variables, memory: Variables, rates: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The next variables and memory. rates: those of this step, from `rates`."""

    def effort(self, candidates: Sequence[Candidate]) -> dict[str, int]:
        return {"iterations": max(candidate.steps for candidate in candidates)}

    def first_loss(self, candidates: Sequence[Candidate]) -> float | None:
        """The lowest of all restarts, which run side by side."""
        return min(
            (each.history[0][1] for each in candidates), key=lambda loss: loss if math.isfinite(loss) else math.inf
        )

    def minimize(self, problem: Problem, on_step: OnStep | None = None) -> SearchResult:
        settings = problem.settings
        lanes = Lanes(len(problem.rngs), settings.together)
        noise = _Noise(problem, lanes, active=bool(self.langevin))
        blocks = lanes.blocks([self._first_state(problem, problem.start(rng)) for rng in problem.rngs])
        constants = problem.constants if lanes.mapped else channels_last(problem.constants)
        group = _group(problem, lanes, blocks, 0.0)
        schedule = moved(self._schedule(settings.iterations, problem.precision), problem.device)
        leaves, spec = pytree.tree_flatten((blocks[0], noise.draw()[0], group, schedule[0], constants))
        step = lanes.over(lambda *trees: self._iteration(problem, *trees))

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(pytree.tree_leaves(step(*pytree.tree_unflatten(tensors, spec))))

        form = form_of((self, lanes, problem.keeps_best, repr(spec), problem.form()))
        runnable = make_runnable(flat, leaves, settings.backend, settings.onednn, form)
        states, shared, fixed = list(map(pytree.tree_leaves, blocks)), *map(pytree.tree_leaves, (group, constants))
        _, layout = pytree.tree_flatten(blocks[0])
        supervisor = _Supervisor(problem, lanes, on_step)
        for iteration in range(settings.iterations):
            drawn = noise.draw()
            for place in supervisor.running:
                own = (*states[place], *drawn[place].values())
                states[place] = list(runnable(*own, *shared, schedule[iteration], *fixed))
            if problem.consensus and iteration >= _CONSENSUS_FROM and iteration % _CONSENSUS_EVERY == 0:
                blocks = [pytree.tree_unflatten(state, layout) for state in states]
                shared = pytree.tree_leaves(_group(problem, lanes, blocks, problem.consensus))
            if supervisor.due(iteration + 1):
                supervisor.look(iteration + 1, [pytree.tree_unflatten(state, layout) for state in states])
            if not supervisor.running:
                break
        return SearchResult(supervisor.candidates(), runnable.backend, runnable.onednn)

    def _schedule(self, iterations: int, precision: torch.dtype) -> Tensor:
        """(iterations, 1 + rates): the fraction of the search that is done, then the rates."""
        rows = [(iteration / iterations, *self.rates(iteration, iterations)) for iteration in range(iterations)]
        return torch.tensor(rows, dtype=precision)

    def _first_state(self, problem: Problem, variables: Tree) -> Tree:
        return {
            "variables": variables,
            "memory": self.memory(variables),
            "best": {name: tensor.clone() for name, tensor in variables.items()},
            "loss": torch.full((), math.inf, dtype=problem.precision, device=problem.device),
        }

    def _iteration(
        self, problem: Problem, state: Tree, noise: Tree, group: Tree, schedule: Tensor, constants: Tree
    ) -> Tree:
        """One iteration of one restart, a pure function of tensors. schedule: a row of `_schedule`."""
        variables, best = state["variables"], state["best"]
        share, rates = schedule[0], schedule[1:]
        gradient, loss = grad_and_value(problem.loss)(variables, group, constants, share)
        better = loss < state["loss"]
        following, memory = self.step(variables, gradient, state["memory"], rates)
        following |= {name: following[name] + self.langevin * rates[0] * drawn for name, drawn in noise.items()}
        return {
            "variables": problem.confined(following),
            "memory": memory,
            "best": {name: torch.where(better, variables[name], best[name]) for name in variables},
            "loss": torch.where(better, loss, state["loss"]) if problem.keeps_best else loss,
        }


@dataclass(frozen=True)
class Lanes:
    """How restarts are computed: all as one traced function under vmap, or each by itself.

    A lane is one restart; a block is what one call of the traced function advances: all lanes, or one.
    number: how many lanes. together: all in one block.
    """

    number: int
    together: bool

    @property
    def mapped(self) -> bool:
        """Whether vmap is used; for a single lane it would only cost time."""
        return self.together and self.number > 1

    def blocks(self, lanes: Sequence[Tree]) -> list[Tree]:
        """The blocks made of one tree for each lane."""
        if not self.mapped:
            return list(lanes)
        return [pytree.tree_map(lambda *leaves: torch.stack(leaves), *lanes)]

    def over(self, step: Callable[..., Tree]) -> Callable[..., Tree]:
        """The step of a block, from that of a lane: (state, noise, group, schedule, constants) -> state."""
        return vmap(step, in_dims=(0, 0, None, None, None), randomness="different") if self.mapped else step

    def block(self, lane: int) -> int:
        """The index of the block that holds this lane."""
        return 0 if self.together else lane

    def lane(self, blocks: Sequence[Tree], lane: int) -> Tree:
        """The part of the blocks that belongs to one lane."""
        tree = blocks[self.block(lane)]
        if not self.mapped:
            return tree
        picked: Tree = pytree.tree_map(lambda leaf: leaf[lane], tree)
        return picked


def _group(problem: Problem, lanes: Lanes, blocks: Sequence[Tree], pull: float) -> Tree:
    """The constants of the consensus term, or nothing if the problem has none."""
    if not problem.consensus:
        return {}
    return problem.common([lanes.lane(blocks, lane)["best"] for lane in range(lanes.number)], pull)


class _Noise:
    """Langevin noise, drawn for each restart from its own stream; empty if not `active`."""

    def __init__(self, problem: Problem, lanes: Lanes, *, active: bool) -> None:
        self.lanes, self.dtype, self.device = lanes, problem.precision, problem.device
        self.shapes = {name: tensor.shape for name, tensor in problem.noisy().items()} if active else {}
        self.generators = [rng.child("langevin").public() for rng in problem.rngs]

    def draw(self) -> list[Tree]:
        """The noise of one iteration, by block."""
        drawn = [
            {name: torch.randn(shape, generator=each, dtype=self.dtype) for name, shape in self.shapes.items()}
            for each in self.generators
        ]
        return self.lanes.blocks(moved(drawn, self.device))


class _Supervisor:
    """Reports on the lanes, decides when each ends, and keeps its result.

    Every lane ends by itself, so that its result does not depend on the others.
    """

    def __init__(self, problem: Problem, lanes: Lanes, on_step: OnStep | None) -> None:
        self.problem, self.settings, self.lanes, self.on_step = problem, problem.settings, lanes, on_step
        self.monitors = [Monitor(problem.settings) for _ in range(lanes.number)]
        self.ended: dict[int, Candidate] = {}
        self.running = sorted({lanes.block(lane) for lane in range(lanes.number)})

    def due(self, iteration: int) -> bool:
        """Whether `look` has something to do after this iteration."""
        checked = iteration in (1, self.settings.iterations) or iteration % self.settings.check_every == 0
        return checked or (self.on_step is not None and iteration % self.settings.report_every == 0)

    def look(self, iteration: int, blocks: Sequence[Tree]) -> None:
        """Report the best lane, and end those that are done."""
        kept = "best" if self.problem.keeps_best else "variables"
        states = {lane: self.lanes.lane(blocks, lane) for lane in range(self.lanes.number) if lane not in self.ended}
        now = {
            lane: Candidate({name: each.clone() for name, each in state[kept].items()}, float(state["loss"]), iteration)
            for lane, state in states.items()
        }
        best = min((self.ended.get(lane) or now[lane] for lane in range(self.lanes.number)), key=Candidate.rank)
        if self.on_step is not None and iteration % self.settings.report_every == 0:
            self.on_step(iteration, best.loss, best.variables)
        for lane, candidate in now.items():
            if self.monitors[lane](iteration, candidate.loss) or iteration == self.settings.iterations:
                self.ended[lane] = candidate
        self.running = sorted({self.lanes.block(lane) for lane in now if lane not in self.ended})

    def candidates(self) -> list[Candidate]:
        """The result of every lane, with its history."""
        return [replace(self.ended[lane], history=tuple(monitor.history)) for lane, monitor in enumerate(self.monitors)]
