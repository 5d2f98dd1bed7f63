"""Distances between updates: closed forms, invariances, derivatives, transforms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.seeds import replayed
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from leaktight.attacks.matching.objectives import (
    AbsoluteError,
    Cosine,
    Euclidean,
    LayerCosine,
    Objective,
    SortedWasserstein,
    SquaredError,
    Sum,
)
from leaktight.core.errors import UsageError

SHAPE = (1, 4, 4)

ALL: dict[str, Objective] = {
    "squared": SquaredError(),
    "squared_layer_mean": SquaredError(reduction="layer_mean"),
    "absolute": AbsoluteError(reduction="element_mean"),
    "euclidean": Euclidean(),
    "cosine": Cosine(),
    "layer_cosine": LayerCosine(),
    "wasserstein": SortedWasserstein(),
    "wasserstein_tensor": SortedWasserstein(scope="tensor"),
    "sum": Sum(terms=((1.0, SquaredError()), (1.0, SortedWasserstein()), (0.5, LayerCosine(beta=2.0)))),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 1, 2), nn.Flatten(), nn.Linear(1, 3)
    )


def random_update(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = replayed(seed).public()
    return {name: torch.randn(p.shape, generator=generator, dtype=dtype) for name, p in network().named_parameters()}


def flat(update: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in update.values()])


def value(objective: Objective, guess: dict[str, Tensor], target: dict[str, Tensor]) -> float:
    return float(objective.loss(guess, objective.prepare(target, network(), SHAPE)))


def scaled(update: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: tensor * factor for name, tensor in update.items()}


GUESS, TARGET = random_update(1), random_update(2)
DIFFERENCE = flat(GUESS) - flat(TARGET)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (SquaredError(), DIFFERENCE.square().sum()),
        (SquaredError(reduction="layer_mean"), DIFFERENCE.square().sum() / len(TARGET)),
        (SquaredError(reduction="element_mean"), DIFFERENCE.square().mean()),
        (AbsoluteError(), DIFFERENCE.abs().sum()),
        (Euclidean(), DIFFERENCE.norm()),
        (Cosine(), 1 - torch.cosine_similarity(flat(GUESS), flat(TARGET), dim=0)),
        (SortedWasserstein(), (flat(GUESS).sort().values - flat(TARGET).sort().values).abs().mean()),
        (
            SortedWasserstein(scope="tensor"),
            sum((GUESS[n].flatten().sort().values - TARGET[n].flatten().sort().values).abs().mean() for n in TARGET),
        ),
        (Sum(terms=((2.0, SquaredError()), (3.0, Euclidean()))), 2 * DIFFERENCE.square().sum() + 3 * DIFFERENCE.norm()),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, Objective) else "",
)
def test_closed_form(objective: Objective, expected: Tensor) -> None:
    assert value(objective, GUESS, TARGET) == pytest.approx(float(expected), rel=1e-12)


def test_wasserstein_is_that_of_scipy() -> None:
    from scipy.stats import wasserstein_distance

    expected = wasserstein_distance(flat(GUESS).numpy(), flat(TARGET).numpy())
    assert value(SortedWasserstein(), GUESS, TARGET) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_zero_for_the_target_itself_and_positive_for_another(name: str) -> None:
    assert value(ALL[name], TARGET, TARGET) == pytest.approx(0, abs=1e-12)
    assert value(ALL[name], GUESS, TARGET) > 0.01


@given(factor=st.floats(1e-6, 1e6), seed=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("objective", [Cosine(), LayerCosine()])
def test_cosines_do_not_see_positive_scale(objective: Objective, factor: float, seed: int) -> None:
    guess = random_update(seed)
    plain = value(objective, guess, TARGET)
    assert value(objective, scaled(guess, factor), TARGET) == pytest.approx(plain, rel=1e-9)
    assert value(objective, guess, scaled(TARGET, factor)) == pytest.approx(plain, rel=1e-9)
    assert value(objective, scaled(guess, -factor), TARGET) == pytest.approx(2 - plain, rel=1e-9)


@given(seed=st.integers(0, 100))
@settings(max_examples=10, deadline=None)
def test_wasserstein_does_not_see_order(seed: int) -> None:
    whole = flat(GUESS)
    order = torch.randperm(len(whole), generator=replayed(seed).public())
    pieces = whole[order].split([tensor.numel() for tensor in GUESS.values()])
    shuffled = {name: piece.view_as(GUESS[name]) for name, piece in zip(GUESS, pieces, strict=True)}
    assert value(SortedWasserstein(), shuffled, TARGET) == pytest.approx(value(SortedWasserstein(), GUESS, TARGET))
    # Tensor by tensor it does see that values changed places between tensors.
    by_tensor = SortedWasserstein(scope="tensor")
    assert value(by_tensor, shuffled, TARGET) != pytest.approx(value(by_tensor, GUESS, TARGET), rel=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_a_withheld_tensor_is_not_matched(name: str) -> None:
    target = {key: tensor for key, tensor in TARGET.items() if key != "0.weight"}
    before = value(ALL[name], GUESS, target)
    assert value(ALL[name], {**GUESS, "0.weight": 1e3 * GUESS["0.weight"]}, target) == before
    assert before != value(ALL[name], GUESS, TARGET)


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_right(name: str) -> None:
    objective = ALL[name]
    prepared = objective.prepare(TARGET, network(), SHAPE)

    def loss(*tensors: Tensor) -> Tensor:
        return objective.loss(dict(zip(GUESS, tensors, strict=True)), prepared)

    inputs = tuple(tensor.clone().requires_grad_() for tensor in GUESS.values())
    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_loss_and_gradient_are_finite_at_zero_and_at_the_target(name: str, dtype: torch.dtype) -> None:
    objective = ALL[name]
    target = random_update(2, dtype)
    zero = scaled(target, 0.0)
    for goal in (target, zero):
        prepared = objective.prepare(goal, network(), SHAPE)
        for guess in (zero, target):
            assert objective.loss(guess, prepared).dtype is dtype
            slopes = grad(lambda g, p=prepared: objective.loss(g, p))(guess)
            assert all(bool(torch.isfinite(slope).all()) for slope in slopes.values())


@pytest.mark.parametrize("name", ALL)
def test_vmap_equals_a_loop_over_guesses_and_targets(name: str) -> None:
    objective = ALL[name]
    guesses, targets = ([random_update(seed) for seed in seeds] for seeds in ((1, 2, 3), (4, 5, 6)))
    prepared = [objective.prepare(target, network(), SHAPE) for target in targets]
    step = grad(lambda guess, constants: objective.loss(guess, constants))
    together = vmap(step)(stacked(guesses), stacked(prepared))
    apart = stacked([step(*pair) for pair in zip(guesses, prepared, strict=True)])
    for key, tensor in apart.items():
        torch.testing.assert_close(together[key], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_traced_equals_eager_on_other_values(name: str) -> None:
    objective = ALL[name]
    prepared = objective.prepare(TARGET, network(), SHAPE)
    step = grad(lambda guess, constants: objective.loss(guess, constants))
    traced = make_fx(step, tracing_mode="fake")(random_update(8), objective.prepare(random_update(9), network(), SHAPE))
    expected, got = step(GUESS, prepared), traced(GUESS, prepared)
    for key, tensor in expected.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-10, atol=1e-12)


def test_prepared_tensors_are_copies_each_its_own() -> None:
    prepared = ALL["sum"].prepare(TARGET, network(), SHAPE)
    leaves, _ = torch.utils._pytree.tree_flatten(prepared)
    places = [leaf.data_ptr() for leaf in leaves]
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert len(set(places)) == len(places)
    assert not set(places) & {tensor.data_ptr() for tensor in TARGET.values()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.weight": torch.full((2, 1, 3, 3), math.nan)}, "NaN or infinity in '0.weight'"),
        ({"0.weight": torch.zeros(2, 1, 3, 4)}, r"'0.weight' of shape 2 x 1 x 3 x 3, got 2 x 1 x 3 x 4"),
        ({"other": torch.zeros(1)}, "got 'other'"),
    ],
)
def test_a_bad_target_is_named(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Cosine().prepare({**TARGET, **change}, network(), SHAPE)


def test_an_update_with_nothing_in_it_is_an_error() -> None:
    with pytest.raises(UsageError, match="at least one tensor"):
        SquaredError().prepare({}, network(), SHAPE)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (SquaredError, {"reduction": "max"}),
        (SortedWasserstein, {"scope": "layer"}),
        (LayerCosine, {"weighting": "cubic"}),
        (LayerCosine, {"beta": 0.5}),
        (LayerCosine, {"beta": math.nan}),
        (Sum, {"terms": ()}),
        (Sum, {"terms": ((math.inf, Cosine()),)}),
    ],
)
def test_bad_settings_are_refused(kind: type[Objective], bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        kind(**bad)


def stacked(values: list[Any]) -> Any:
    """Nested mappings of tensors, put together along a new first dimension."""
    return torch.utils._pytree.tree_map(lambda *tensors: torch.stack(tensors), *values)
