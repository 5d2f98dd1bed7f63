"""The loss of an order of the examples where a search would start: a first look at many orders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from leaktight.attacks.matching.orders import Order, in_order
from leaktight.attacks.matching.problem import MatchingProblem
from leaktight.attacks.optimizers.compile import make_runnable
from leaktight.attacks.optimizers.form import form_of
from leaktight.attacks.optimizers.optimizer import Layout, Tree, vector

_WORTH_TRACING = 50  # orders; tracing takes as long as some hundred eager losses


class FirstLook:
    """The loss of an order, summed over the first starts of a problem.

    Orders of one epoch differ in their labels alone, so that many of them share one traced graph.
    """

    def __init__(self, problem: MatchingProblem) -> None:
        self.problem = problem
        self.starts = [problem.start(rng) for rng in problem.rngs]
        self.looks = 0
        self.traced: Callable[[Tensor, Tree], Tensor] | None = None

    def __call__(self, order: Order, starts: int) -> float:
        self.looks += 1
        points = self.starts[:starts]
        problem = self.problem
        evidence = in_order(problem.evidence, order)
        constants = problem.constants if evidence.labels is None else {**problem.constants, "labels": evidence.labels}
        if len(order) == 1 and problem.settings.backend != "eager" and self.looks > _WORTH_TRACING:
            self.traced = self.traced or _traced(problem, self.starts[0])
            return sum(float(self.traced(vector(start), constants)) for start in points)
        other = replace(problem, evidence=evidence, constants=constants)
        with torch.no_grad():
            return sum(float(other.loss(start, {}, constants)) for start in points)


def _traced(problem: MatchingProblem, start: Tree) -> Callable[[Tensor, Tree], Tensor]:
    """The loss of a problem as a traced function of a start and the constants."""
    layout = Layout(start)
    leaves, spec = pytree.tree_flatten(problem.constants)

    def flat(point: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (problem.loss(layout.tree(point), {}, pytree.tree_unflatten(tensors, spec)),)

    form = form_of(("first look", vars(layout), repr(spec), problem.form()))
    runnable = make_runnable(flat, [vector(start), *leaves], "fx", problem.settings.onednn, form)
    return lambda point, constants: runnable(point, *pytree.tree_leaves(constants))[0]
