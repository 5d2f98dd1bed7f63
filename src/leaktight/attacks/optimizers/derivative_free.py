"""Search without derivatives: an optimiser asks for the losses of some points, is told them, and asks again.

All points of a question are evaluated side by side, by one traced function.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from leaktight.attacks.optimizers.compile import Runnable, make_runnable
from leaktight.attacks.optimizers.optimizer import Candidate, OnStep, Optimizer, Problem, SearchResult, Watch
from leaktight.attacks.optimizers.trees import Layout, Tree, vector
from leaktight.core.errors import LeaktightError
from leaktight.core.rng import Rng

Points: TypeAlias = NDArray[np.float64]
"""(K, D): K points to look at. Losses are (K,)."""

_HOPELESS = 1e30  # stands for a loss that is no number
_ABREAST = 8
"""Points that one call evaluates; fixed, so that no bit depends on how many are asked for.

With a DCGAN of 64x64 pixels a point took 13.8 ms alone, 6.4 among 8, 5.8 among 16 (LeNet); 47, 32 and 31 (ResNet-20).
"""


class Dialogue(ABC):
    """An optimiser at work on one search."""

    @abstractmethod
    def ask(self) -> Points:
        """Points whose losses it wants to know."""

    @abstractmethod
    def tell(self, points: Points, losses: Points) -> None:
        """The losses of the points that it asked for; all finite."""

    @property
    def done(self) -> bool:
        """Whether it has nothing left to ask."""
        return False


@dataclass(frozen=True, kw_only=True)
class DerivativeFree(Optimizer):
    """An optimiser that sees losses alone."""

    @abstractmethod
    def begin(self, start: Points, *, rng: Rng) -> Dialogue:
        """A search from `start`, (D,)."""

    def minimize(self, problem: Problem, on_step: OnStep | None = None) -> SearchResult:
        settings = problem.settings
        example = problem.start(problem.rngs[0])
        layout = Layout(example)
        constants, spec = pytree.tree_flatten(problem.constants)

        def unflatten(point: Tensor) -> Tree:
            return problem.confined(layout.tree(point))

        def losses(points: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            fixed = pytree.tree_unflatten(tensors, spec)
            each = vmap(lambda point: problem.loss(unflatten(point), {}, fixed), randomness="different")
            return (each(points),)

        points = torch.stack([vector(example)] * _ABREAST)
        runnable = make_runnable(losses, [points, *constants], settings.backend, settings.onednn)
        candidates: list[Candidate] = []
        for rng in problem.rngs:
            candidates.append(
                self._restart(problem, rng, lambda asked: _evaluated(runnable, asked, constants), unflatten, on_step)
            )
            if settings.stop_below is not None and candidates[-1].loss < settings.stop_below:
                break
        return SearchResult(candidates, runnable.backend, runnable.onednn)

    def _restart(
        self,
        problem: Problem,
        rng: Rng,
        evaluate: Callable[[Tensor], Tensor],
        unflatten: Callable[[Tensor], Tree],
        on_step: OnStep | None,
    ) -> Candidate:
        settings = problem.settings
        best = vector(problem.start(rng))
        lowest, evaluations, watch = math.inf, 0, Watch(settings)
        dialogue = self.begin(best.to(torch.float64).numpy(), rng=rng.child("ask"))
        for iteration in range(1, settings.iterations + 1):
            asked = dialogue.ask()
            points = torch.from_numpy(asked).to(problem.precision)
            losses = evaluate(points)
            evaluations += len(points)
            place = int(losses.argmin())
            if float(losses[place]) < lowest:
                lowest, best = float(losses[place]), points[place]
            dialogue.tell(asked, losses.to(torch.float64).numpy())
            if on_step is not None and iteration % settings.report_every == 0:
                on_step(iteration, lowest, unflatten(best))
            if watch(iteration, lowest) or dialogue.done:
                break
        return Candidate(unflatten(best), lowest, evaluations, tuple(watch.history))


@dataclass(frozen=True, kw_only=True)
class CmaEs(DerivativeFree):
    """Covariance matrix adaptation: points are drawn from a normal law that moves to where losses are low.

    population: points of an iteration; None: 4 + 3 ln D. spread: the standard deviation at first.
    Needs the extra `cma`. Reference: Hansen, The CMA Evolution Strategy: A Tutorial, 2016.
    """

    population: int | None = None
    spread: float = 1.0

    def __post_init__(self) -> None:
        if self.population is not None and self.population < 4:
            raise ValueError(f"expected population >= 4, got {self.population}")
        if not self.spread > 0:
            raise ValueError(f"expected spread > 0, got {self.spread}")

    @property
    def steps_per_iteration(self) -> int:
        return self.population or 20

    def begin(self, start: Points, *, rng: Rng) -> Dialogue:
        return _Strategy(self, start, rng)


class _Strategy(Dialogue):
    def __init__(self, settings: CmaEs, start: Points, rng: Rng) -> None:
        try:
            import cma
        except ImportError as error:
            raise LeaktightError("CMA-ES needs the package cma; pip install 'leaktight[generative]'") from error
        drawn = rng.public_numpy()
        options = {
            "popsize": settings.population or 4 + int(3 * math.log(len(start))),
            "randn": lambda *shape: drawn.standard_normal(shape),
            "seed": math.nan,  # leave NumPy's global generator alone
            "verbose": -9,
        }
        self.strategy = cma.CMAEvolutionStrategy(start, settings.spread, options)

    def ask(self) -> Points:
        return np.stack(self.strategy.ask())

    def tell(self, points: Points, losses: Points) -> None:
        self.strategy.tell(list(points), losses.tolist())

    @property
    def done(self) -> bool:
        return bool(self.strategy.stop())


def _evaluated(runnable: Runnable, points: Tensor, constants: Sequence[Tensor]) -> Tensor:
    """The losses of any number of points, `_ABREAST` at a time; the last group is filled up with its last point."""
    found = []
    for group in points.split(_ABREAST):
        full = torch.cat([group, group[-1:].expand(_ABREAST - len(group), -1)])
        found.append(runnable(full, *constants)[0][: len(group)])
    return torch.cat(found).nan_to_num(nan=_HOPELESS, posinf=_HOPELESS, neginf=_HOPELESS)
