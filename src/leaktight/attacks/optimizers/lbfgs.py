"""L-BFGS in compact form: the direction is a few matrix products, not a loop over the history.

Reference: Byrd, Nocedal and Schnabel 1994, theorem 2.2. The variant with a line search, in a box, is in `boxed.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from leaktight.attacks.optimizers.boxed import descend
from leaktight.attacks.optimizers.compile import make_runnable
from leaktight.attacks.optimizers.form import form_of
from leaktight.attacks.optimizers.optimizer import (
    Candidate,
    Layout,
    Monitor,
    OnStep,
    Optimizer,
    Problem,
    SearchResult,
    SearchSettings,
    channels_last,
    vector,
)
from leaktight.core.devices import CPU
from leaktight.core.errors import require_above, require_at_least

ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]
Look = Callable[[int, float, Tensor], bool]
"""Called with the number of evaluations, the loss and the point; True stops the search."""


@dataclass(frozen=True, kw_only=True)
class Lbfgs(Optimizer):
    """Limited-memory BFGS.

    line_search: "none" takes steps of `learning_rate` (the first shortened), as `torch.optim.LBFGS` does by default and
    as DLG runs it; "wolfe" takes steps that fulfil Wolfe's conditions, and stops when none lowers the loss.
    history: number of past steps kept, >= 1. steps_per_iteration: evaluations in an iteration, >= 1; in published
    attacks an iteration is a call of `torch.optim.LBFGS.step`, up to 20.
    """

    smooth: ClassVar[bool] = True

    line_search: Literal["none", "wolfe"] = "wolfe"
    learning_rate: float = 1.0
    history: int = 100
    steps_per_iteration: int = 20

    def __post_init__(self) -> None:
        require_above(0, learning_rate=self.learning_rate)
        require_at_least(1, history=self.history, steps_per_iteration=self.steps_per_iteration)

    def minimize(self, problem: Problem, on_step: OnStep | None = None) -> SearchResult:
        settings = problem.settings
        starts = [problem.start(rng) for rng in problem.rngs]
        layout = Layout(starts[0])
        constants, spec = pytree.tree_flatten(channels_last(problem.constants))

        def flat(point: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            fixed = pytree.tree_unflatten(tensors, spec)
            gradient, value = grad_and_value(lambda here: problem.loss(layout.tree(here), {}, fixed))(point)
            return value, gradient

        form = form_of(("lbfgs", vars(layout), repr(spec), problem.form()))
        runnable = make_runnable(flat, [vector(starts[0]), *constants], settings.backend, settings.onednn, form)

        def evaluate(point: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = runnable(point, *constants)
            return value, gradient

        candidates: list[Candidate] = []
        for start in starts:
            monitor = Monitor(settings)

            def look(count: int, loss: float, point: Tensor, monitor: Monitor = monitor) -> bool:
                if on_step is not None and count % settings.report_every == 0:
                    on_step(count, loss, layout.tree(point))
                return monitor(count, loss)

            found = SEARCHES[self.line_search](self, evaluate, vector(start), settings.iterations, look, problem.boxed)
            history = tuple(monitor.history)
            candidates.append(Candidate(layout.tree(found.point), found.loss, found.evaluations, history))
            if self._last(found, settings):
                break
        return SearchResult(candidates, runnable.backend, runnable.onednn)

    def _last(self, found: Best, settings: SearchSettings) -> bool:
        """Whether no further restart is needed: the loss is low enough, or still fell when the evaluations ended."""
        if settings.stop_below is None:
            return False
        ended = found.evaluations >= settings.iterations * self.steps_per_iteration
        return found.loss < settings.stop_below or (settings.patience is not None and ended)


def wolfe(
    settings: Lbfgs, function: ValueAndGradient, start: Tensor, iterations: int, look: Look, boxed: int = 0
) -> Best:
    """Minimise from `start`, a flat vector, in its precision; steps are computed in float64.

    boxed: how many first entries stay in [0, 1].
    """
    best, budget = Best(start), iterations * settings.steps_per_iteration

    def evaluate(point: Tensor) -> tuple[float, Tensor]:
        if best.evaluations == budget:
            raise _Enough
        here = point.to(start, copy=True)
        value, slope = function(here)
        loss = float(value)
        best.offer(here, loss)
        if look(best.evaluations, best.loss, best.point):
            raise _Enough
        return loss if math.isfinite(loss) else math.inf, slope.to(point).nan_to_num()

    with suppress(_Enough):
        descend(evaluate, start.to(CPU, torch.float64), boxed, settings.history)
    return best


def plain(
    settings: Lbfgs, function: ValueAndGradient, start: Tensor, iterations: int, look: Look, boxed: int = 0
) -> Best:
    """The same with steps of a fixed rate, as in PyTorch, and without bounds."""
    memory = Curvature(settings.history, start)
    best, budget = Best(start), iterations * settings.steps_per_iteration
    point = start
    value, slope = function(point)
    best.offer(point, float(value))
    rate = settings.learning_rate * min(1.0, 1.0 / max(float(slope.abs().sum()), 1e-30))
    while best.evaluations < budget:
        step = rate * memory.direction(slope)
        following = point + step
        value, next_slope = function(following)
        loss = float(value)
        if not math.isfinite(loss):
            break
        best.offer(following, loss)
        if look(best.evaluations, best.loss, best.point) or not float(next_slope.abs().max()) > 0:
            break
        memory.add(step, next_slope - slope)
        point, slope, rate = following, next_slope, settings.learning_rate
    return best


SEARCHES: Mapping[str, Callable[[Lbfgs, ValueAndGradient, Tensor, int, Look, int], Best]] = {
    "wolfe": wolfe,
    "none": plain,
}
"""By `line_search`."""


class _Enough(Exception):
    """Raised to end a search."""


class Best:
    """The point with the lowest loss so far, and the number of evaluations."""

    def __init__(self, start: Tensor) -> None:
        self.point, self.loss, self.evaluations = start, float("inf"), 0

    def offer(self, point: Tensor, loss: float) -> None:
        self.evaluations += 1
        if loss < self.loss:
            self.point, self.loss = point.clone(), loss


class Curvature:
    """The last steps S and gradient changes Y, and the products of them that the direction needs."""

    def __init__(self, history: int, like: Tensor) -> None:
        self.history = history
        self.steps, self.changes = like.new_zeros(0, len(like)), like.new_zeros(0, len(like))
        self.products, self.gram = like.new_zeros(0, 0), like.new_zeros(0, 0)  # S Y^T and Y Y^T

    def add(self, step: Tensor, change: Tensor) -> None:
        """Add a step and its gradient change if the curvature along it is positive."""
        if not float(step @ change) > 1e-10:
            return
        first = 1 if len(self.steps) == self.history else 0
        self.steps = torch.cat([self.steps[first:], step[None]])
        self.changes = torch.cat([self.changes[first:], change[None]])
        self.products = _bordered(self.products[first:, first:], self.steps @ change, self.changes @ step)
        gram = self.changes @ change
        self.gram = _bordered(self.gram[first:, first:], gram, gram)

    def direction(self, slope: Tensor) -> Tensor:
        """Minus the estimated inverse Hessian times the gradient."""
        if not len(self.steps):
            return -slope
        scale = self.products[-1, -1] / self.gram[-1, -1]
        upper = self.products.triu()
        along, across = self.steps @ slope, self.changes @ slope
        p = torch.linalg.solve_triangular(upper, along[:, None], upper=True)
        inner = self.products.diagonal()[:, None] * p + scale * (self.gram @ p - across[:, None])
        q = torch.linalg.solve_triangular(upper.T, inner, upper=False)
        correction: Tensor = self.steps.T @ q - scale * (self.changes.T @ p)
        return correction[:, 0].neg() - scale * slope


def _bordered(matrix: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """A matrix with one more column (its last entry the corner) and one more row."""
    return torch.cat([torch.cat([matrix, column[:-1, None]], 1), row[None, :]], 0)
