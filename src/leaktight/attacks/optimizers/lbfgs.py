"""L-BFGS in compact form: the direction is a few products of matrices, not a loop over the history.

Reference: Byrd, Nocedal and Schnabel 1994, theorem 2.2. With a line search, SciPy's L-BFGS-B, which is of the same form
and knows a box, does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]
Watch = Callable[[int, float, Tensor], bool]
"""Called with the number of evaluations, the loss and the point; True stops the search."""


class Found(NamedTuple):
    """The best point, its loss, and how often the function was evaluated."""

    point: Tensor
    loss: float
    evaluations: int


@dataclass(frozen=True, kw_only=True)
class Lbfgs:
    """Limited-memory BFGS.

    line_search: "none" takes steps of `learning_rate` (the first shortened), as `torch.optim.LBFGS` does by default and
    as DLG runs it; "wolfe" is SciPy's, and stops by itself where no step helps.
    history: how many steps the curvature is remembered for.
    steps_per_iteration: an iteration of the published attacks is a call of `torch.optim.LBFGS.step`, up to 20 steps.
    """

    line_search: Literal["none", "wolfe"] = "wolfe"
    learning_rate: float = 1.0
    history: int = 100
    steps_per_iteration: int = 20

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"expected learning_rate > 0, got {self.learning_rate}")
        if self.history < 1 or self.steps_per_iteration < 1:
            raise ValueError(
                f"expected history and steps_per_iteration >= 1, got {self.history} and {self.steps_per_iteration}"
            )

    def search(
        self,
        function: ValueAndGradient,
        start: Tensor,
        iterations: int,
        watch: Watch,
        boxed: int = 0,
    ) -> Found:
        """Minimise from `start`, a flat vector. boxed: how many entries, the first, a line search keeps in [0, 1]."""
        budget = iterations * self.steps_per_iteration
        if self.line_search == "wolfe":
            return self._wolfe(function, start, budget, watch, boxed)
        return self._plain(function, start, budget, watch)

    def _wolfe(self, function: ValueAndGradient, start: Tensor, budget: int, watch: Watch, boxed: int) -> Found:
        from scipy.optimize import minimize  # slow to import

        best = Best(start)

        def evaluate(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            here = torch.from_numpy(point).to(start.dtype)
            value, slope = function(here)
            loss = float(value)
            best.offer(here, loss)
            if watch(best.evaluations, best.loss, best.point):
                raise _Enough
            return loss if np.isfinite(loss) else 1e30, np.nan_to_num(slope.double().numpy())

        with suppress(_Enough):
            minimize(
                evaluate,
                start.double().numpy(),
                jac=True,
                method="L-BFGS-B",
                bounds=[(0.0, 1.0)] * boxed + [(None, None)] * (len(start) - boxed) if boxed else None,
                options={"maxcor": self.history, "maxiter": budget, "maxfun": budget, "ftol": 0.0, "gtol": 0.0},
            )
        return Found(best.point, best.loss, best.evaluations)

    def _plain(self, function: ValueAndGradient, start: Tensor, budget: int, watch: Watch) -> Found:
        memory = Curvature(self.history, start)
        best = Best(start)
        point = start
        value, slope = function(point)
        best.offer(point, float(value))
        rate = self.learning_rate * min(1.0, 1.0 / max(float(slope.abs().sum()), 1e-30))
        while best.evaluations < budget:
            step = rate * memory.direction(slope)
            following = point + step
            value, next_slope = function(following)
            loss = float(value)
            if not np.isfinite(loss):
                break
            best.offer(following, loss)
            if watch(best.evaluations, best.loss, best.point) or not float(next_slope.abs().max()) > 0:
                break
            memory.add(step, next_slope - slope)
            point, slope, rate = following, next_slope, self.learning_rate
        return Found(best.point, best.loss, best.evaluations)


class _Enough(Exception):
    """Ends a search of SciPy's."""


class Best:
    """The best point so far."""

    def __init__(self, start: Tensor) -> None:
        self.point, self.loss, self.evaluations = start, float("inf"), 0

    def offer(self, point: Tensor, loss: float) -> None:
        self.evaluations += 1
        if loss < self.loss:
            self.point, self.loss = point.clone(), loss


class Curvature:
    """The last steps s and changes of the gradient y, and the products of them that the direction needs."""

    def __init__(self, history: int, like: Tensor) -> None:
        self.history = history
        self.steps, self.changes = like.new_zeros(0, len(like)), like.new_zeros(0, len(like))
        self.products, self.gram = like.new_zeros(0, 0), like.new_zeros(0, 0)  # S Y^T and Y Y^T

    def add(self, step: Tensor, change: Tensor) -> None:
        """Remember a step, unless the curvature along it is not positive."""
        if not float(step @ change) > 1e-10:
            return
        first = 1 if len(self.steps) == self.history else 0
        self.steps = torch.cat([self.steps[first:], step[None]])
        self.changes = torch.cat([self.changes[first:], change[None]])
        self.products = _bordered(self.products[first:, first:], self.steps @ change, self.changes @ step)
        gram = self.changes @ change
        self.gram = _bordered(self.gram[first:, first:], gram, gram)

    def direction(self, slope: Tensor) -> Tensor:
        """Minus the inverse Hessian estimate times the slope."""
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
