"""Levenberg-Marquardt on the equations of an update, after a search that came near.

A search by a loss meets the square of the condition number of the equations, and slows down long before they are
solved. With some thousand unknowns the equations can be linearised in full, and a few steps solve them to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import jvp, vmap

from leaktight.attacks.matching.attack import Matching, MatchingResult
from leaktight.attacks.matching.sought import Pixels
from leaktight.attacks.matching.view import Evidence
from leaktight.attacks.optimizers.optimizer import Layout, Tree, vector
from leaktight.core.rng import Rng
from leaktight.core.types import Params

EXPLAINED = 4.0
"""The largest mean square of residuals, in units of the expected errors, of a solution."""

_MOST_UNKNOWNS = 4096
_MOST_ENTRIES = 80_000_000  # of the matrix of derivatives, 640 MB
_TOGETHER = 64  # derivatives computed at once
_FIRST_DAMPING = 1e-4  # relative to the diagonal
_LEAST_DAMPING = 1e-13
_STEPS = 20
_TRIALS = 12
_SLOW = 0.02  # two relative falls of the surprise below this, far from a solution, are a failure
_CLOSE = 0.1  # a fall below this, near a solution, has converged: a standard deviation is worth 1


@dataclass(frozen=True)
class Equations:
    """values(point) = goal up to errors, and what is likely before: a Gaussian distribution of points.

    errors: the standard deviation of each. centre, precision: the mean and the inverse variance of each unknown.
    """

    values: Callable[[Tensor], Tensor]
    goal: Tensor
    errors: Tensor
    centre: Tensor
    precision: Tensor

    def residuals(self, point: Tensor) -> Tensor:
        with torch.no_grad():
            return (self.values(point) - self.goal) / self.errors

    def surprise(self, point: Tensor, residuals: Tensor) -> float:
        """Twice minus the logarithm of the probability, up to a constant."""
        away = point - self.centre
        return float(residuals @ residuals + away @ (self.precision * away))

    def derivatives(self, point: Tensor) -> Tensor:
        """The derivatives of the residuals (equations, N), by forward differentiation, some columns at once."""
        columns = torch.eye(len(point), dtype=point.dtype, device=point.device)
        result = point.new_empty(len(self.goal), len(point))
        along = vmap(lambda way: jvp(self.values, (point,), (way,))[1])
        for start in range(0, len(point), _TOGETHER):
            result[:, start : start + _TOGETHER] = along(columns[start : start + _TOGETHER]).T
        return result.div_(self.errors[:, None])


@dataclass(frozen=True)
class Solution:
    """misfit: the mean square of the residuals; about 1 if the errors are those that were expected."""

    point: Tensor
    misfit: float


def solve(equations: Equations, start: Tensor, steps: int) -> Solution:
    """The most likely point near `start`, after at most `steps` steps of Levenberg and Marquardt."""
    point, residuals = start, equations.residuals(start)
    surprise, damping, slow = equations.surprise(point, residuals), _FIRST_DAMPING, 0
    for _ in range(steps):
        slopes = equations.derivatives(point)
        curvature = slopes.T @ slopes
        curvature.diagonal().add_(equations.precision)
        downhill = -(slopes.T @ residuals + equations.precision * (point - equations.centre))
        del slopes
        before = surprise
        for _ in range(_TRIALS):
            step = _step(curvature, downhill, damping)
            if step is not None:
                following = equations.residuals(point + step)
                reached = equations.surprise(point + step, following)
                if reached < surprise:
                    point, residuals, surprise = point + step, following, reached
                    break
            damping *= 10
        explained = surprise < EXPLAINED * len(residuals)
        slow = slow + 1 if before - surprise < (_CLOSE if explained else _SLOW * before) else 0
        if slow >= (1 if explained else 2) or surprise == before:
            break
        damping = max(damping / 30, _LEAST_DAMPING)
    return Solution(point, float(residuals.square().mean()))


def _step(curvature: Tensor, downhill: Tensor, damping: float) -> Tensor | None:
    """The damped step, or None if the matrix is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(curvature + torch.diag(damping * curvature.diagonal()))
    return None if int(failed) else torch.cholesky_solve(downhill[:, None], factor)[:, 0]


def can_refine(attack: Matching, evidence: Evidence) -> bool:
    """Whether `refined` can follow: pixels in float64, found by a method for smooth losses, and not too many."""
    views = [view for _, view, _ in evidence.views]
    unknowns = evidence.num_examples * torch.Size(evidence.shape).numel()
    entries = sum(tensor.numel() for view in views for tensor in view.target.values())
    return (
        isinstance(attack.sought, Pixels)
        and attack.optimizer.smooth
        and attack.precision == "float64"
        and evidence.labels is not None
        and len(views) == 1
        and len(views[0].steps) <= 1
        and unknowns <= _MOST_UNKNOWNS
        and unknowns * entries <= _MOST_ENTRIES
    )


def refined(
    attack: Matching,
    evidence: Evidence,
    found: MatchingResult,
    errors: Mapping[str, Tensor],
    *,
    spread: float,
    rng: Rng,
) -> tuple[MatchingResult, float]:
    """What a search found, after steps towards a solution of the equations, and the misfit of these.

    errors: the standard deviations of the entries of the update by name. spread: that of pixels, around grey.
    """
    ((_, view, _),), labels = evidence.views, evidence.labels
    assert labels is not None
    best = found.search.best
    layout = Layout(best.variables)

    def flat(tensors: Params) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in view.target])

    def values(point: Tensor) -> Tensor:
        variables = layout.tree(point)
        unknowns = {name: variables[f"0:{name}"] for name in view.unknowns}
        return flat(view.guess(variables["images"], labels, view.params, view.buffers, {**view.held, **unknowns}))

    start = vector(best.variables)
    centre, precision = _before(best.variables, spread)
    goal = flat(view.target)
    equations = Equations(values, goal, flat(errors).to(goal), centre, precision)
    solution = solve(equations, start, _STEPS)
    problem = attack.problem(evidence, rng, [0], together=False)
    variables = problem.confined(layout.tree(solution.point))
    with torch.no_grad():
        loss = float(problem.loss(variables, {}, problem.constants))
    candidate = replace(best, variables=variables, loss=loss)
    search = replace(found.search, candidates=[candidate])
    return MatchingResult(search, problem.guess(variables), problem.distance(variables)), solution.misfit


def _before(variables: Tree, spread: float) -> tuple[Tensor, Tensor]:
    """The mean and the inverse variance of all variables; nothing is known of those that are no images."""
    known = {name: torch.full_like(each, float(name == "images")) for name, each in variables.items()}
    images = vector(known)
    return 0.5 * images, images / spread**2
