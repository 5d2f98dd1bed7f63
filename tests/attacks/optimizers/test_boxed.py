"""Quasi-Newton steps in a box: against SciPy's L-BFGS-B, the dense BFGS formula and the conditions of a minimum."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from tests.seeds import replayed
from torch import Tensor

from leaktight.attacks.optimizers.boxed import FreeCurvature, descend
from leaktight.attacks.optimizers.lbfgs import Lbfgs, wolfe


class Ended(Exception):
    """The evaluations are used up."""


def searched(
    value: Callable[[Tensor], Tensor], start: Tensor, boxed: int, evaluations: int = 400, history: int = 10
) -> list[tuple[Tensor, float]]:
    """Every point that a search looks at, and its loss."""
    seen: list[tuple[Tensor, float]] = []

    def evaluate(point: Tensor) -> tuple[float, Tensor]:
        if len(seen) == evaluations:
            raise Ended
        here = point.clone().requires_grad_()
        loss = value(here)
        (slope,) = torch.autograd.grad(loss, here)
        seen.append((point.clone(), loss.item()))
        return loss.item() if math.isfinite(loss.item()) else math.inf, slope.nan_to_num()

    with contextlib.suppress(Ended):
        descend(evaluate, start, boxed, history)
    return seen


def best_of(seen: list[tuple[Tensor, float]]) -> tuple[Tensor, float]:
    return min(seen, key=lambda each: each[1])


def bent(size: int, seed: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A function with a minimum outside of the box for some variables, and a start."""
    generator = replayed(seed).public()
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    goal = 0.5 + torch.randn(size, generator=generator, dtype=torch.float64)

    def value(point: Tensor) -> Tensor:
        away = root @ (point - goal)
        return (away.square() + away.pow(4) / 10).sum() / size

    return value, torch.rand(size, generator=generator, dtype=torch.float64)


def dense(steps: list[Tensor], changes: list[Tensor]) -> Tensor:
    """The matrix of the BFGS formula (Nocedal and Wright, 6.19), one pair after the other."""
    scale = (changes[-1] @ changes[-1]) / (steps[-1] @ changes[-1])
    matrix = scale * torch.eye(len(steps[0]), dtype=steps[0].dtype)
    for step, change in zip(steps, changes, strict=True):
        pushed = matrix @ step
        matrix = matrix - torch.outer(pushed, pushed) / (step @ pushed)
        matrix = matrix + torch.outer(change, change) / (change @ step)
    return matrix


def test_directions_are_those_of_the_dense_formula_over_the_free_variables() -> None:
    """Products are carried on while pairs are replaced and variables come and go."""
    generator = replayed(0).public()
    root = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    hessian, memory = root @ root.T + torch.eye(12, dtype=torch.float64), FreeCurvature(4, root[0])
    steps: list[Tensor] = []
    for number in range(11):
        steps.append(torch.randn(12, generator=generator, dtype=torch.float64) * 10.0 ** (number % 3))
        memory.add(steps[-1], hessian @ steps[-1])
        kept = steps[-4:]
        matrix = dense(kept, [hessian @ step for step in kept])
        for _ in range(2):
            slope = torch.randn(12, generator=generator, dtype=torch.float64)
            free = torch.rand(12, generator=generator) < 0.6
            expected = torch.zeros_like(slope)
            expected[free] = -torch.linalg.solve(matrix[free][:, free], slope[free])
            torch.testing.assert_close(memory.direction(slope, free), expected, rtol=1e-8, atol=1e-10)


def test_pairs_without_curvature_are_not_kept() -> None:
    slope, free = torch.ones(3, dtype=torch.float64), torch.tensor([True, False, True])
    memory = FreeCurvature(4, slope)
    memory.add(slope, -slope)
    memory.add(slope, torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64))
    assert not len(memory)
    assert memory.direction(slope, free).tolist() == [-1.0, 0.0, -1.0]


@pytest.mark.parametrize("size", [5, 40])
def test_it_ends_where_scipy_ends(size: int) -> None:
    value, start = bent(size, 1)

    def both(point: object) -> tuple[float, object]:
        here = torch.as_tensor(point).requires_grad_()
        loss = value(here)
        return loss.item(), torch.autograd.grad(loss, here)[0].numpy()

    bounds = [(0.0, 1.0)] * (size - 2) + [(None, None)] * 2
    theirs = minimize(
        both, start.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options={"ftol": 0, "gtol": 1e-9}
    )
    point, loss = best_of(searched(value, start, size - 2))
    assert loss == pytest.approx(theirs.fun, rel=1e-9)
    torch.testing.assert_close(point, torch.from_numpy(theirs.x), atol=1e-5, rtol=0)
    inside = point[: size - 2]
    assert ((inside == 0) | (inside == 1)).any(), "some bound binds"


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 25), seed=st.integers(0, 10_000), share=st.floats(0, 1), history=st.integers(1, 8))
def test_every_end_is_a_minimum_in_the_box(size: int, seed: int, share: float, history: int) -> None:
    """All looks are in the box; at the end no slope points to where a variable may still go."""
    value, start = bent(size, seed)
    boxed = round(share * size)
    seen = searched(value, start, boxed, evaluations=3000, history=history)
    assert all(((point[:boxed] >= 0) & (point[:boxed] <= 1)).all() for point, _ in seen)
    point = best_of(seen)[0].requires_grad_()
    (slope,) = torch.autograd.grad(value(point), point)
    least, most = point.detach() - slope, point.detach() - slope
    least[:boxed], most[:boxed] = least[:boxed].clamp(0, 1), most[:boxed].clamp(0, 1)
    torch.testing.assert_close(least, point.detach(), atol=1e-4, rtol=0)


def test_first_steps_grow_until_the_slope_has_fallen() -> None:
    """From far away on a long slope, the first step of length one is doubled."""
    seen = searched(lambda point: (point - 100.0).square().sum(), torch.zeros(1, dtype=torch.float64), 0)
    assert [float(point) for point, _ in seen[:5]] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert best_of(seen)[1] == pytest.approx(0.0, abs=1e-18)


def test_a_loss_that_is_not_finite_is_stepped_back_from() -> None:
    seen = searched(lambda point: (point - 2.0 - point.log()).sum(), torch.full((3,), 5.0, dtype=torch.float64), 0)
    assert best_of(seen)[0].tolist() == pytest.approx([1.0] * 3, abs=1e-6)
    far = searched(
        lambda point: (1e8 * (point - 2)).square().sum() - point.log().sum(), torch.full((1,), 1e-3).double(), 0
    )
    assert float(best_of(far)[0]) == pytest.approx(2.0, abs=1e-6)


def test_a_flat_loss_ends_at_once() -> None:
    seen = searched(lambda point: 0 * point.sum(), torch.full((4,), 0.5, dtype=torch.float64), 4)
    assert len(seen) == 1


@pytest.mark.parametrize("unit", [1e-14, 1e-8, 1.0, 1e8])
def test_the_unit_of_the_loss_does_not_matter(unit: float) -> None:
    """Also in float32, where a step as small as the gradient would be lost in the point."""
    goal = torch.linspace(-0.5, 1.5, 20)

    def value(point: Tensor) -> tuple[Tensor, Tensor]:
        away = torch.linspace(1, 5, 20).square() * (point - goal)
        return unit * (away * (point - goal)).sum(), 2 * unit * away

    found = wolfe(Lbfgs(), value, torch.full((20,), 0.5), 10, lambda *_: False, boxed=15)
    expected = torch.cat([goal[:15].clamp(0, 1), goal[15:]])
    torch.testing.assert_close(found.point, expected, atol=1e-3, rtol=0)  # the root of what float32 tells apart


def test_no_point_is_looked_at_again_at_the_end() -> None:
    value, start = bent(12, 3)
    points = [tuple(point.tolist()) for point, _ in searched(value, start, 8, evaluations=3000)]
    assert len(points) < 3000, "it ends by itself"
    assert len(points) - len(set(points)) <= 2, "but where the steps of a line search meet at a corner"
