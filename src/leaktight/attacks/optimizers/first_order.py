"""First-order search: all lanes abreast, one traced function for a whole iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from leaktight.attacks.matching.problem import Candidate, Found, Plateau, Search, channels_last
from leaktight.attacks.optimizers.compile import make_runnable
from leaktight.attacks.optimizers.descent import FirstOrder
from leaktight.attacks.optimizers.lanes import Lanes, Tree

_CONSENSUS_FROM, _CONSENSUS_EVERY = 500, 100


def descend(search: Search, together: bool) -> list[Found]:
    """What was found, by victim. together: all lanes are one traced function under vmap, or else take turns."""
    attack = search.attack
    optimizer = _optimizer(search)
    lanes = Lanes(len(search.rngs), len(search.rngs[0]), together)
    noise = _Noise(search, lanes)
    blocks = lanes.own([[_first_state(search, search.start(rng)) for rng in row] for row in search.rngs])
    constants, dims = lanes.constants(search.fixed)
    if not lanes.mapped:
        constants = list(map(channels_last, constants))
    groups = _groups(search, lanes, blocks, 0.0)
    schedule = torch.tensor(
        [
            (iteration / attack.iterations, *optimizer.rates(iteration, attack.iterations))
            for iteration in range(attack.iterations)
        ],
        dtype=search.precision,
    )
    leaves, spec = pytree.tree_flatten((blocks[0], noise.draw()[0], groups[0], schedule[0], constants[0]))
    step = lanes.over(lambda *trees: _step(search, *trees), dims)

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(pytree.tree_leaves(step(*pytree.tree_unflatten(tensors, spec))))

    runnable = make_runnable(flat, leaves, attack.backend, attack.onednn)
    states, shared, fixed = (list(map(pytree.tree_leaves, trees)) for trees in (blocks, groups, constants))
    _, layout = pytree.tree_flatten(blocks[0])
    ends = _Ends(search, lanes)
    for iteration in range(attack.iterations):
        drawn = noise.draw()
        for place in ends.running:
            own = (*states[place], *drawn[place].values())
            states[place] = list(runnable(*own, *shared[place], schedule[iteration], *fixed[place]))
        if attack.consensus and iteration >= _CONSENSUS_FROM and iteration % _CONSENSUS_EVERY == 0:
            blocks = [pytree.tree_unflatten(state, layout) for state in states]
            shared = list(map(pytree.tree_leaves, _groups(search, lanes, blocks, attack.consensus)))
        if ends.due(iteration + 1):
            ends.look(iteration + 1, [pytree.tree_unflatten(state, layout) for state in states])
        if not ends.running:
            break
    return [Found(candidates, runnable.backend, runnable.onednn) for candidates in ends.candidates()]


def _optimizer(search: Search) -> FirstOrder:
    assert isinstance(search.attack.optimizer, FirstOrder)
    return search.attack.optimizer


def _first_state(search: Search, variables: Tree) -> Tree:
    return {
        "variables": variables,
        "memory": _optimizer(search).memory(variables),
        "best": {name: tensor.clone() for name, tensor in variables.items()},
        "loss": torch.full((), math.inf, dtype=search.precision),
    }


def _step(search: Search, state: Tree, noise: Tree, group: Tree, schedule: Tensor, fixed: Tree) -> Tree:
    """One iteration of one lane: a pure function of tensors. schedule: the share that is done, then the rates."""
    optimizer = _optimizer(search)
    variables, best = state["variables"], state["best"]
    share, rates = schedule[0], schedule[1:]
    gradient, loss = grad_and_value(search.loss)(variables, group, fixed, share)
    better = loss < state["loss"]
    following, memory = optimizer.step(variables, gradient, state["memory"], rates)
    following |= {name: following[name] + optimizer.langevin * rates[0] * drawn for name, drawn in noise.items()}
    return {
        "variables": search.form.confined(following),
        "memory": memory,
        "best": {name: torch.where(better, variables[name], best[name]) for name in variables},
        "loss": torch.where(better, loss, state["loss"]) if search.keeps_best else loss,
    }


def _groups(search: Search, lanes: Lanes, blocks: Sequence[Tree], pull: float) -> list[Tree]:
    """What draws the restarts of a victim together: the mean of their best images, and how strongly. By block."""
    if not search.attack.consensus:
        return [{} for _ in blocks]
    means = [
        torch.stack(
            [
                search.candidate(victim, lanes.lane(blocks, victim, restart)["best"], 0.0, 0).images
                for restart in range(lanes.restarts)
            ]
        ).mean(0)
        for victim in range(lanes.victims)
    ]
    return lanes.of_victims([{"consensus": mean, "pull": mean.new_tensor(pull)} for mean in means])


class _Noise:
    """Langevin noise, from a stream of each lane's own; nothing where the optimiser adds none."""

    def __init__(self, search: Search, lanes: Lanes) -> None:
        self.lanes, self.active = lanes, bool(_optimizer(search).langevin)
        first = search.form.draw(search.rngs[0][0]) if self.active else {}
        self.shapes, self.dtype = {name: tensor.shape for name, tensor in first.items()}, search.precision
        self.generators = [[rng.child("langevin").public() for rng in row] for row in search.rngs]

    def draw(self) -> list[Tree]:
        """For every block."""
        if not self.active:
            return [{} for _ in range(self.lanes.blocks)]
        return self.lanes.own(
            [
                [
                    {name: torch.randn(shape, generator=each, dtype=self.dtype) for name, shape in self.shapes.items()}
                    for each in row
                ]
                for row in self.generators
            ]
        )


class _Ends:
    """Looks at the lanes now and then, reports, and keeps what each had found when it stopped.

    Every lane stops by itself, so that it comes out the same in whatever company it is run.
    """

    def __init__(self, search: Search, lanes: Lanes) -> None:
        self.search, self.attack, self.lanes = search, search.attack, lanes
        self.watches = {place: Plateau(search.attack) for place in lanes.places}
        self.ended: dict[tuple[int, int], Candidate] = {}
        self.running = list(range(lanes.blocks))

    def due(self, iteration: int) -> bool:
        """Whether there is anything to tell or to decide."""
        told = self.search.progress is not None and iteration % self.attack.progress_every == 0
        return told or iteration % self.attack.check_every == 0 or iteration == self.attack.iterations

    def look(self, iteration: int, blocks: Sequence[Tree]) -> None:
        last = iteration == self.attack.iterations
        told = iteration % self.attack.progress_every == 0
        for victim in range(self.lanes.victims):
            row = [(victim, restart) for restart in range(self.lanes.restarts)]
            running = [place for place in row if place not in self.ended]
            now = {place: self._candidate(victim, iteration, self.lanes.lane(blocks, *place)) for place in running}
            best = min((self.ended.get(place) or now[place] for place in row), key=Candidate.rank)
            if running and told and self.search.progress is not None:
                self.search.progress(victim, iteration, best.loss, best.images)
            for place, candidate in now.items():
                if self.watches[place](iteration, candidate.loss) or last:
                    self.ended[place] = candidate
        self.running = sorted({self.lanes.block(*place) for place in self.lanes.places if place not in self.ended})

    def _candidate(self, victim: int, iteration: int, state: Tree) -> Candidate:
        kept = state["best" if self.search.keeps_best else "variables"]
        return self.search.candidate(victim, kept, float(state["loss"]), iteration)

    def candidates(self) -> list[list[Candidate]]:
        """By victim and restart."""
        return [
            [self.ended[victim, restart] for restart in range(self.lanes.restarts)]
            for victim in range(self.lanes.victims)
        ]
