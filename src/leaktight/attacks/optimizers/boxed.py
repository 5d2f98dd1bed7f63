"""Quasi-Newton steps in a box: where the loss is least, by its curvature along past steps, among points that keep the
variables at a bound there.

Reference: Byrd, Lu, Nocedal and Zhu, A limited memory algorithm for bound constrained optimization, 1995, section 5.1.
A whole step is projected onto the box instead of a search along the path of steepest descent for the bounds that it
meets, which costs more than all else where many pixels lie at a bound.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Evaluate = Callable[[Tensor], tuple[float, Tensor]]
"""The loss and its gradient at a point."""

Reached = tuple[Tensor, float, Tensor]
"""A point, its loss and its gradient."""

_FALL = 1e-4  # of the loss that a step must bring, relative to what the slope promises
_STEEP = 0.9  # of the slope that may be left after a step, before a longer one is tried
_TRIALS = 20
_SMALLEST = 1e-300  # length of a direction, lest it divide by zero
_LEAST_CURVATURE = 1e-10  # cosine of a step and its change of the gradient below which the pair is not kept


def descend(evaluate: Evaluate, start: Tensor, boxed: int, history: int) -> None:
    """Lower the loss from `start`, a flat vector, until no step does; `evaluate` raises to end it.

    boxed: how many first entries stay in [0, 1]. history: how many past steps are kept. The first step has a length of
    one, as a loss can have any unit; one after past steps were given up is no longer than the slope either.
    """
    least = torch.full_like(start, -torch.inf)
    most = torch.full_like(start, torch.inf)
    least[:boxed], most[:boxed] = 0, 1
    curvature = FreeCurvature(history, start)
    point = start.clamp(least, most)
    loss, slope = evaluate(point)
    largest = torch.inf  # rate without past steps
    while True:
        free = ~((point <= least) & (slope > 0) | (point >= most) & (slope < 0))
        along = curvature.direction(slope, free)
        rate = 1.0 if len(curvature) else min(largest, 1 / float(along.norm().clamp(min=_SMALLEST)))
        found = _step(evaluate, (point, loss, slope), along, rate, least, most)
        largest = 1.0
        if found is not None:
            curvature.add(found[0] - point, found[2] - slope)
            point, loss, slope = found
        elif len(curvature):
            curvature = FreeCurvature(history, start)
        else:
            return


def _step(evaluate: Evaluate, here: Reached, along: Tensor, rate: float, least: Tensor, most: Tensor) -> Reached | None:
    """A point along a direction, projected onto the box, that fulfils Wolfe's conditions; None if none lowers the loss.

    rate: of the first trial.
    """
    point, loss, slope = here
    promised = float(along @ slope)
    if not promised < 0:
        return None
    best: Reached | None = None
    for _ in range(_TRIALS):
        following = (point + rate * along).clamp(least, most)
        if torch.equal(following, point):
            return best
        reached, next_slope = evaluate(following)
        if reached < loss and reached <= loss + _FALL * min(float(slope @ (following - point)), 0.0):
            if best is not None and reached >= best[1]:
                return best
            best = following, reached, next_slope
            if float(next_slope @ along) >= _STEEP * promised:
                return best
            rate *= 2
        elif best is not None:
            return best
        else:  # where a parabola through what is known has its least value
            excess = reached - loss - rate * promised
            rate = min(max(-promised * rate * rate / (2 * excess) if excess > 0 else 0.0, 0.1 * rate), 0.5 * rate)
    return best


class FreeCurvature:
    """The last steps and their changes of the gradient, and the products of these that a direction needs.

    A pair is kept at a length of its step of one, which changes nothing, as only ratios count. The newest pair takes
    the place of the oldest one. bent: of step i and change j, if j is no newer (others are old). square: of step i and
    step j. Those over free variables are carried on as variables come and go. After `add` comes `direction`.
    """

    def __init__(self, history: int, like: Tensor) -> None:
        self.history = history
        self.count = 0
        self.newest = -1  # its place; -1: none
        self.born = torch.zeros(history, dtype=torch.long)  # number of the step in each place
        self.changes, self.steps = like.new_zeros(2, history, len(like))
        self.bent, self.square = like.new_zeros(2, history, history)
        self.changes_free, self.bent_free, self.square_free = like.new_zeros(3, history, history)  # over the free
        self.scale = 1.0
        self.free = torch.ones_like(like, dtype=torch.bool)
        self.missing = False  # products of the newest pair

    def __len__(self) -> int:
        return self.count

    def add(self, step: Tensor, change: Tensor) -> None:
        """Keep a step and its change of the gradient if the curvature along it is positive."""
        length, curved = float(step.norm()), float(step @ change)
        if not curved > _LEAST_CURVATURE * length * float(change.norm()):
            return
        self.newest = (self.newest + 1) % self.history
        self.count = max(self.count, self.newest + 1)
        self.born[self.newest] = self.born.max() + 1
        torch.div(change, length, out=self.changes[self.newest])
        torch.div(step, length, out=self.steps[self.newest])
        self.scale = float(change @ change) / curved
        self.missing = True

    def direction(self, slope: Tensor, free: Tensor) -> Tensor:
        """To the least value of the quadratic model over the free variables; zero for the others."""
        slope = torch.where(free, slope, 0.0)
        if not self.count:
            return -slope
        used, scale = slice(self.count), self.scale
        along_changes, along_steps = self._products(slope, free)
        bent, born = self.bent[used, used], self.born[used]
        later = torch.where(born[:, None] > born, bent, 0.0) - self.bent_free[used, used]
        first = torch.cat([-bent.diagonal().diag() - self.changes_free[used, used] / scale, later.T], 1)
        second = torch.cat([later, scale * (self.square - self.square_free)[used, used]], 1)
        solved, _ = torch.linalg.solve_ex(torch.cat([first, second]), torch.cat([along_changes, scale * along_steps]))
        bend = solved[used] @ self.changes[used] + scale * solved[self.count :] @ self.steps[used]
        return torch.where(free, slope / -scale - bend / scale**2, 0.0)

    def _products(self, slope: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
        """Those of changes and of steps with the gradient, after all others are brought up to date."""
        used, new = slice(self.count), self.newest
        changes, steps = self.changes[used], self.steps[used]
        for places, sign in ((free & ~self.free, 1), (self.free & ~free, -1)):
            rows, others = changes[:, places], steps[:, places]
            self.changes_free[used, used] += sign * (rows @ rows.T)
            self.bent_free[used, used] += sign * (others @ rows.T)
            self.square_free[used, used] += sign * (others @ others.T)
        self.free = free
        if not self.missing:
            return changes @ slope, steps @ slope
        self.missing = False
        change, step = torch.where(free, self.changes[new], 0.0), torch.where(free, self.steps[new], 0.0)
        vectors = torch.stack([slope, change, step, self.steps[new]], 1)
        by_changes, by_steps = changes @ vectors, steps @ vectors
        self.changes_free[new, used] = self.changes_free[used, new] = by_changes[:, 1]
        self.bent_free[used, new], self.bent_free[new, used] = by_steps[:, 1], by_changes[:, 2]
        self.square_free[new, used] = self.square_free[used, new] = by_steps[:, 2]
        self.bent[new, used] = by_changes[:, 3]
        self.square[new, used] = self.square[used, new] = by_steps[:, 3]
        return by_changes[:, 0], by_steps[:, 0]
