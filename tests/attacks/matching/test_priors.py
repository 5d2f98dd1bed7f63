"""Penalties on images: closed forms, derivatives, transforms; batch-norm statistics against a plain computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from leaktight.attacks.matching.priors import (
    BatchNormStatistics,
    GroupConsistency,
    ImagePrior,
    L2Norm,
    TotalVariation,
)
from leaktight.core.errors import ModelError, UsageError
from leaktight.core.inputs import Images
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.models.initialise import build_model
from leaktight.models.resnet import ResNet20
from leaktight.models.small import LeNetZhu
from leaktight.models.surgery import batch_statistics

CIFAR = Images(3, 32, 32)

PRIORS: dict[str, ImagePrior] = {
    "absolute_mean": TotalVariation(),
    "squared": TotalVariation(form="squared"),
    "isotropic": TotalVariation(form="isotropic"),
    "double_opponent": TotalVariation(form="double_opponent"),
    "l2": L2Norm(),
}


def images(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=replayed(seed).public(), dtype=dtype)


def ramp(across: float, down: float) -> Tensor:
    """(1, 1, 3, 4): each step to the right adds `across`, each step down `down`."""
    rows, columns = torch.arange(3.0).double(), torch.arange(4.0).double()
    return (rows[:, None] * down + columns[None] * across)[None, None]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("absolute_mean", 0.3 + 0.4),
        ("squared", 2 * (0.09 + 0.16)),
        # 6 pixels have both neighbours, 2 in the last column only the lower, 3 in the last row only the right one.
        ("isotropic", (6 * 0.5 + 2 * 0.4 + 3 * 0.3) / 12),
        ("double_opponent", (6 * 0.5 + 2 * 0.4 + 3 * 0.3) / 12),
    ],
)
def test_total_variation_of_a_ramp(form: Any, expected: float) -> None:
    assert float(TotalVariation(form=form).penalty(ramp(0.3, 0.4))) == pytest.approx(expected, abs=1e-6)


def test_double_opponents_see_colour_where_the_colours_alone_vary_alike() -> None:
    grey = ramp(0.1, 0.2).expand(1, 3, 3, 4)
    coloured = torch.cat([ramp(0.1, 0.2), ramp(-0.1, -0.2), ramp(0.1, 0.2)], 1)
    prior = TotalVariation(form="double_opponent")
    one = float(TotalVariation(form="isotropic").penalty(ramp(0.1, 0.2)))
    # Six planes: three colours, and red - green, red - blue, green - blue.
    assert float(prior.penalty(grey)) == pytest.approx(3 * one / 6, abs=1e-6)
    assert float(prior.penalty(coloured)) == pytest.approx((3 + 2 + 0 + 2) * one / 6, abs=1e-6)


def test_the_exponents_of_double_opponents() -> None:
    prior = TotalVariation(form="double_opponent", p=1, q=1)
    assert float(prior.penalty(ramp(0.3, 0.4))) == pytest.approx((6 * 0.7 + 2 * 0.4 + 3 * 0.3) / 12, abs=1e-6)


def test_l2_norm() -> None:
    pixels = torch.tensor([0.0, 0.5, 1.0, 0.25]).double().view(1, 1, 2, 2)
    assert float(L2Norm(centre=0, spread=1).penalty(pixels)) == pytest.approx(0.5 * (0.25 + 1 + 0.0625) / 4)
    assert float(L2Norm().penalty(pixels)) == pytest.approx(0.5 * (4 + 0 + 4 + 1) / 4)


def test_group_consistency_is_the_norm_over_the_area() -> None:
    guess, consensus = images(2, 3, 4, 5), images(2, 3, 4, 5, seed=1)
    expected = float((guess - consensus).norm()) / 20
    assert float(GroupConsistency().penalty(guess, consensus)) == pytest.approx(expected)
    slope = grad(GroupConsistency().penalty)(guess, guess.clone())
    assert torch.equal(slope, torch.zeros_like(slope))


@pytest.mark.parametrize("name", PRIORS)
def test_more_variation_costs_more(name: str) -> None:
    noisy = images(2, 3, 8, 8)
    calm = 0.5 + 0.1 * (noisy - 0.5)
    assert float(PRIORS[name].penalty(calm)) < float(PRIORS[name].penalty(noisy))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PRIORS)
def test_gradients_are_right(name: str, channels: int) -> None:
    assert torch.autograd.gradcheck(PRIORS[name].penalty, images(2, channels, 3, 4).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PRIORS)
def test_gradients_of_a_flat_image_are_finite(name: str, dtype: torch.dtype) -> None:
    slope = grad(PRIORS[name].penalty)(torch.full((1, 3, 4, 4), 0.5, dtype=dtype))
    assert slope.dtype is dtype
    assert bool(torch.isfinite(slope).all())


@pytest.mark.parametrize("name", PRIORS)
def test_vmap_and_tracing_change_nothing(name: str) -> None:
    assert_transforms(PRIORS[name].penalty, images(3, 2, 3, 5, 4))


def test_images_without_neighbours_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 2x2"):
        TotalVariation().penalty(torch.zeros(1, 3, 1, 8))


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (TotalVariation, {"form": "cubic"}),
        (TotalVariation, {"p": 0.0}),
        (L2Norm, {"spread": 0.0}),
        (L2Norm, {"centre": float("nan")}),
        (BatchNormStatistics, {"first_layer_weight": -1.0}),
    ],
)
def test_bad_settings_are_refused(kind: type, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        kind(**bad)


def small() -> nn.Sequential:
    layers = (nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Sigmoid(), nn.Flatten(), nn.BatchNorm1d(12))
    return nn.Sequential(*layers).double().requires_grad_(False)


def test_statistics_by_hand() -> None:
    model = small().eval()
    batch = images(5, 1, 4, 4)
    first = model[0](batch)
    second = model[3](model[2](model[1](first)))
    means = [first.mean((0, 2, 3)), second.mean(0)]
    variances = [first.var((0, 2, 3), correction=0), second.var(0, correction=0)]
    parts = [float(m.norm() + (v - 1).norm()) for m, v in zip(means, variances, strict=True)]  # running: 0 and 1
    params, buffers = dict(model.named_parameters()), buffers_of(model)
    for weight in (10.0, 1.0):
        got = BatchNormStatistics(first_layer_weight=weight).penalty(batch, model, params, buffers)
        assert float(got) == pytest.approx(weight * parts[0] + parts[1])


def test_true_statistics_cost_nothing() -> None:
    model = nn.Sequential(*list(small())[:3])
    model.eval()
    batch = images(5, 1, 4, 4)
    inside = model[0](batch)
    params, wrong = dict(model.named_parameters()), buffers_of(model)
    right = {"1.running_mean": inside.mean((0, 2, 3)), "1.running_var": inside.var((0, 2, 3), correction=0)}
    costs = [float(BatchNormStatistics().penalty(batch, model, params, {**wrong, **b})) for b in (right, {})]
    assert costs[0] == pytest.approx(0, abs=1e-10)
    assert costs[1] > 1


@pytest.mark.parametrize("training", [True, False])
def test_statistics_under_transforms(training: bool) -> None:
    model = batch_statistics(small()).train(training)
    params, buffers = dict(model.named_parameters()), buffers_of(model)
    prior = BatchNormStatistics()
    assert torch.autograd.gradcheck(
        lambda batch: prior.penalty(batch, model, params, buffers), images(3, 1, 4, 4).requires_grad_()
    )

    def penalty(batch: Tensor, p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        return prior.penalty(batch, model, p, b)

    assert_transforms(penalty, images(3, 4, 1, 4, 4), params, buffers)


def test_statistics_of_a_residual_network_traced_with_its_weights_as_inputs() -> None:
    model = batch_statistics(build_model(ResNet20(), CIFAR, 10, rng=replayed(0))).train()
    params, buffers = cloned(parameters_of(model)), cloned(buffers_of(model))
    step = grad(lambda batch, p, b: BatchNormStatistics().penalty(batch, model, p, b))
    batch = images(2, 3, 32, 32, dtype=torch.float32)
    traced = make_fx(step, tracing_mode="fake")(batch, params, buffers)
    other = images(2, 3, 32, 32, seed=1, dtype=torch.float32)
    torch.testing.assert_close(traced(other, params, buffers), step(other, params, buffers), rtol=1e-3, atol=1e-5)


def test_nothing_given_is_changed() -> None:
    model = small().train()  # this one would move its running statistics
    params, buffers = dict(model.named_parameters()), buffers_of(model)
    before = cloned({**params, **buffers})
    BatchNormStatistics().penalty(images(5, 1, 4, 4), model, params, buffers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in {**params, **buffers}.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_models_without_statistics_are_named() -> None:
    lenet = build_model(LeNetZhu(), CIFAR, 10, rng=replayed(0))
    with pytest.raises(ModelError, match="batch norm, got FeedForward"):
        BatchNormStatistics().penalty(
            torch.rand(1, *CIFAR.shape, generator=replayed(0).public()), lenet, parameters_of(lenet), {}
        )
    model = small()
    buffers = {name: tensor for name, tensor in buffers_of(model).items() if name != "4.running_var"}
    with pytest.raises(ModelError, match="running statistics of '4'"):
        BatchNormStatistics().penalty(images(3, 1, 4, 4), model, parameters_of(model), buffers)


def assert_transforms(penalty: Callable[..., Tensor], many: Tensor, *constants: Any) -> None:
    """The gradient under vmap, traced, and both, is that of one set of images after another."""
    step = grad(penalty)
    together = vmap(step, in_dims=(0, *(None for _ in constants)))
    expected = torch.stack([step(one, *constants) for one in many])
    torch.testing.assert_close(together(many, *constants), expected, rtol=1e-10, atol=1e-12)
    traced = make_fx(lambda *args: together(*args), tracing_mode="fake")(images(*many.shape, seed=5), *constants)
    torch.testing.assert_close(traced(many, *constants), expected, rtol=1e-10, atol=1e-12)
