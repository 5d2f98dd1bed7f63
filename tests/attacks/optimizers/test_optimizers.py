from __future__ import annotations

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor

from leaktight.attacks.optimizers.derivative_free import CmaEs
from leaktight.attacks.optimizers.descent import Adam, RmsProp
from leaktight.attacks.optimizers.lbfgs import Curvature, Lbfgs, plain, wolfe
from leaktight.attacks.optimizers.optimizer import Optimizer, Problem, SearchSettings, Tree
from leaktight.core.rng import Rng


def quadratic(size: int = 30) -> tuple[Tensor, Tensor]:
    generator = replayed(0).public()
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return root @ root.T + torch.eye(size, dtype=torch.float64), torch.randn(size, generator=generator).double()


def two_loop(steps: list[Tensor], changes: list[Tensor], slope: Tensor) -> Tensor:
    """The textbook recursion (Nocedal and Wright, algorithm 7.4)."""
    result, factors = slope.clone(), []
    for step, change in zip(reversed(steps), reversed(changes), strict=True):
        factors.append((step @ result) / (step @ change))
        result = result - factors[-1] * change
    result = result * (steps[-1] @ changes[-1]) / (changes[-1] @ changes[-1])
    for step, change, factor in zip(steps, changes, reversed(factors), strict=True):
        result = result + step * (factor - (change @ result) / (step @ change))
    return -result


def test_the_compact_form_is_the_two_loop_recursion() -> None:
    matrix, slope = quadratic()
    generator = replayed(1).public()
    memory, steps = Curvature(5, slope), []
    for _ in range(9):
        steps.append(torch.randn(len(slope), generator=generator, dtype=torch.float64))
        memory.add(steps[-1], matrix @ steps[-1])
    steps = steps[-5:]
    expected = two_loop(steps, [matrix @ step for step in steps], slope)
    torch.testing.assert_close(memory.direction(slope), expected, rtol=1e-9, atol=1e-12)


def test_without_curvature_it_goes_downhill() -> None:
    _, slope = quadratic()
    memory = Curvature(5, slope)
    memory.add(slope, -slope)
    assert torch.equal(memory.direction(slope), -slope)


def test_plain_steps_are_those_of_pytorch() -> None:
    """The same points as `torch.optim.LBFGS` visits, on a function that is not quadratic."""

    def value(point: Tensor) -> Tensor:
        return (point**4).sum() / 4 + (point[1:] - point[:-1] ** 2).square().sum()

    start = torch.linspace(-1, 1, 8, dtype=torch.float64)
    parameter = start.clone().requires_grad_()
    reference = torch.optim.LBFGS(
        [parameter], lr=0.5, max_iter=12, history_size=4, tolerance_change=0, tolerance_grad=0
    )
    theirs: list[float] = []

    def closure() -> Tensor:
        reference.zero_grad()
        loss = value(parameter)
        loss.backward()
        theirs.append(float(loss.detach()))
        return loss

    reference.step(closure)
    ours: list[float] = []

    def function(point: Tensor) -> tuple[Tensor, Tensor]:
        leaf = point.detach().requires_grad_()
        loss = value(leaf)
        (slope,) = torch.autograd.grad(loss, leaf)
        ours.append(float(loss.detach()))
        return loss.detach(), slope

    plain(Lbfgs(learning_rate=0.5, history=4, steps_per_iteration=12), function, start, 1, lambda *_: False)
    assert ours == pytest.approx(theirs, rel=1e-9)


class Quadratic(Problem):
    """x A x / 2 - b x, which has its minimum at A^-1 b."""

    def start(self, rng: Rng) -> Tree:
        return {"x": torch.randn(30, generator=rng.public(), dtype=torch.float64)}

    def loss(self, variables: Tree, group: Tree, constants: Tree, share: Tensor | None = None) -> Tensor:
        x = variables["x"]
        value: Tensor = 0.5 * x @ constants["matrix"] @ x - constants["target"] @ x
        return value


@pytest.mark.parametrize(
    ("optimizer", "iterations", "tolerance"),
    [
        (Lbfgs(line_search="none"), 20, 1e-7),
        (Lbfgs(line_search="wolfe"), 20, 1e-7),
        (Adam(learning_rate=0.1, decay="cosine"), 4000, 1e-3),
        (RmsProp(learning_rate=0.02, momentum=0.5, decay="cosine"), 4000, 1e-3),
        (CmaEs(spread=0.5), 900, 1e-3),
    ],
    ids=["lbfgs-plain", "lbfgs-wolfe", "adam", "rms_prop", "cma_es"],
)
def test_every_optimiser_finds_the_minimum(optimizer: Optimizer, iterations: int, tolerance: float) -> None:
    """One interface, on a problem that is no attack; watching changes nothing."""
    if isinstance(optimizer, CmaEs):
        pytest.importorskip("cma")
    settings = SearchSettings(iterations=iterations, onednn=False)
    matrix, target = quadratic()
    problem = Quadratic(
        settings=settings,
        rngs=[replayed(1), replayed(2)],
        precision=torch.float64,
        constants={"matrix": matrix, "target": target},
    )
    told: list[int] = []

    def watch(step: int, loss: float, variables: Tree) -> None:
        told.append(step)
        assert not variables["x"].is_inference(), "what is handed on can be differentiated"

    found = optimizer.minimize(problem)
    watched = optimizer.minimize(problem, watch)
    assert not found.best.variables["x"].is_inference()
    torch.testing.assert_close(found.best.variables["x"], torch.linalg.solve(matrix, target), atol=tolerance, rtol=0)
    assert torch.equal(found.best.variables["x"], watched.best.variables["x"])
    assert len(found.candidates) == 2
    first_loss = optimizer.first_loss(found.candidates)
    assert first_loss is not None
    assert found.best.loss < first_loss
    assert [step % settings.check_every for step, _ in found.best.history[1:]] == [0] * len(found.best.history[1:])
    assert all(step % settings.report_every == 0 for step in told)


def test_the_box_holds_and_binds() -> None:
    far = torch.tensor([2.0, -1.0, 0.3], dtype=torch.float64)
    found = wolfe(
        Lbfgs(),
        lambda point: ((point - far).square().sum(), 2 * (point - far)),
        torch.full_like(far, 0.5),
        5,
        lambda *_: False,
        boxed=len(far),
    )
    assert found.point.tolist() == pytest.approx([1.0, 0.0, 0.3], abs=1e-6)


def test_a_search_can_be_stopped() -> None:
    matrix, target = quadratic()
    found = wolfe(
        Lbfgs(), lambda point: (point @ matrix @ point, 2 * matrix @ point), target, 100, lambda count, *_: count >= 7
    )
    assert found.evaluations == 7


def test_adam_is_that_of_pytorch() -> None:
    start = torch.linspace(-1, 1, 5, dtype=torch.float64)
    parameter = start.clone().requires_grad_()
    reference = torch.optim.Adam([parameter], lr=0.1)
    ours, optimizer = {"x": start}, Adam(learning_rate=0.1)
    memory = optimizer.memory(ours)
    for iteration in range(5):
        reference.zero_grad()
        parameter.pow(4).sum().backward()
        reference.step()
        rates = torch.tensor(optimizer.rates(iteration, 5), dtype=torch.float64)
        ours, memory = optimizer.step(ours, {"x": 4 * ours["x"] ** 3}, memory, rates)
    torch.testing.assert_close(ours["x"], parameter.detach())


def test_schedules() -> None:
    steps = Adam(learning_rate=1.0, decay="steps")
    assert [round(steps.rates(i, 8)[0], 6) for i in range(8)] == [1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001]
    warm = Adam(learning_rate=1.0, warm_up=4)
    assert [warm.rates(i, 100)[0] for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert Adam(decay="cosine", learning_rate=1.0).rates(50, 100)[0] == pytest.approx(0.5)


def test_slopes() -> None:
    gradient = torch.tensor([-3.0, 0.0, 0.2])
    rates = torch.tensor([0.1, 1.0, 1.0, 0.5])
    for slope, expected in (("sign", [-1.0, 0.0, 1.0]), ("soft_sign", (torch.tanh(gradient * 0.5) / 0.5).tolist())):
        optimizer = Adam(slope=slope, betas=(0.0, 0.0))  # type: ignore[arg-type]
        _, memory = optimizer.step({"x": gradient}, {"x": gradient}, optimizer.memory({"x": gradient}), rates)
        assert memory["x.first"].tolist() == pytest.approx(expected)


class Positive(Quadratic):
    """The same, above zero."""

    def loss(self, variables: Tree, group: Tree, constants: Tree, share: Tensor | None = None) -> Tensor:
        return super().loss(variables, group, constants, share) + 2


@pytest.mark.parametrize(
    ("iterations", "patience", "restarts"),
    [(1, None, 2), (1, 30, 1), (50, 30, 2)],
    ids=["without patience", "still falling", "stands still"],
)
def test_lbfgs_begins_again_unless_its_loss_still_fell(iterations: int, patience: int | None, restarts: int) -> None:
    matrix, target = quadratic()
    settings = SearchSettings(iterations=iterations, patience=patience, stop_below=0.1, check_every=10, onednn=False)
    problem = Positive(
        settings=settings,
        rngs=[replayed(1), replayed(2)],
        precision=torch.float64,
        constants={"matrix": matrix, "target": target},
    )
    found = Lbfgs(line_search="none", learning_rate=0.5, steps_per_iteration=10).minimize(problem)
    assert len(found.candidates) == restarts
