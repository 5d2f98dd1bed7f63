"""Search without derivatives: an optimiser proposes points, gets their losses, and proposes again.

The proposed points are evaluated side by side by one traced function.
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
from leaktight.attacks.optimizers.form import form_of
from leaktight.attacks.optimizers.optimizer import (
    Candidate,
    Layout,
    Monitor,
    OnStep,
    Optimizer,
    Problem,
    SearchResult,
    Tree,
    vector,
)
from leaktight.core.errors import LeaktightError, require_above, require_at_least
from leaktight.core.rng import Rng

Points: TypeAlias = NDArray[np.float64]
"""(K, D): K points of D coordinates. Their losses are (K,)."""

_HOPELESS = 1e30  # in place of a loss that is not finite
_ABREAST = 8
"""Points that one call evaluates; fixed, so that no result depends on how many are proposed.

With a DCGAN of 64x64 pixels a point took 13.8 ms alone, 6.4 among 8, 5.8 among 16 (LeNet); 47, 32 and 31 (ResNet-20).
"""


class Dialogue(ABC):
    """The state of an optimiser in one restart."""

    @abstractmethod
    def ask(self) -> Points:
        """The points to evaluate next, (K, D)."""

    @abstractmethod
    def tell(self, points: Points, losses: Points) -> None:
        """Receive the losses of the points of `ask`, all finite."""

    @property
    def done(self) -> bool:
        """Whether the optimiser has converged."""
        return False


@dataclass(frozen=True, kw_only=True)
class DerivativeFree(Optimizer):
    """An optimiser that uses losses and no gradients."""

    @abstractmethod
    def begin(self, start: Points, *, rng: Rng) -> Dialogue:
        """Begin a restart at `start`, (D,)."""

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
        form = form_of(("derivative-free", vars(layout), repr(spec), problem.form()))
        runnable = make_runnable(losses, [points, *constants], settings.backend, settings.onednn, form)
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
        lowest, evaluations, monitor = math.inf, 0, Monitor(settings)
        dialogue = self.begin(best.to("cpu", torch.float64).numpy(), rng=rng.child("ask"))
        for iteration in range(1, settings.iterations + 1):
            asked = dialogue.ask()
            points = torch.from_numpy(asked).to(problem.device, problem.precision)
            losses = evaluate(points)
            evaluations += len(points)
            place = int(losses.argmin())
            if float(losses[place]) < lowest:
                lowest, best = float(losses[place]), points[place]
            dialogue.tell(asked, losses.to("cpu", torch.float64).numpy())
            if on_step is not None and iteration % settings.report_every == 0:
                on_step(iteration, lowest, unflatten(best))
            if monitor(iteration, lowest) or dialogue.done:
                break
        return Candidate(unflatten(best), lowest, evaluations, tuple(monitor.history))


@dataclass(frozen=True, kw_only=True)
class CmaEs(DerivativeFree):
    """CMA-ES: points are drawn from a normal distribution that adapts to where losses are low.

    population: points in an iteration, >= 4; None: 4 + 3 ln D. spread: the first standard deviation, > 0.
    Needs the extra `cma`. Reference: Hansen, The CMA Evolution Strategy: A Tutorial, 2016.
    """

    population: int | None = None
    spread: float = 1.0

    def __post_init__(self) -> None:
        require_at_least(4, population=self.population)
        require_above(0, spread=self.spread)

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
            "seed": math.nan,  # do not seed NumPy's global generator
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
    """The losses of any number of points, `_ABREAST` at a time; the last group is padded with its last point."""
    found = []
    for group in points.split(_ABREAST):
        full = torch.cat([group, group[-1:].expand(_ABREAST - len(group), -1)])
        found.append(runnable(full, *constants)[0][: len(group)])
    return torch.cat(found).nan_to_num(nan=_HOPELESS, posinf=_HOPELESS, neginf=_HOPELESS)
