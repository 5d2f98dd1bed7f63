"""Closed forms of attackers who know the defense, against derivations by hand on tiny networks."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from tests.damage import undecomposed_once
from tests.seeds import replayed
from torch import Tensor, nn
from torch.nn import functional as F

from leaktight.adaptive.moments import Moments, solved
from leaktight.adaptive.precode_head import Head
from leaktight.core.rng import global_seed
from leaktight.core.types import Update
from leaktight.defenses.adadefense import AdaDefense
from leaktight.models.bottleneck import BottleneckedLinear, VariationalBottleneck

FEATURES, LATENT, CLASSES = 7, 9, 6


class Fixed(VariationalBottleneck):
    """A bottleneck whose noise is given."""

    noise: Tensor

    def draw(self, like: Tensor) -> Tensor:
        return self.noise


def bottlenecked(count: int, penalty: float) -> tuple[Head, Fixed, Tensor, Tensor, Tensor]:
    """What the attacker has; then the bottleneck, the features, their gradient and the labels of a batch."""
    with global_seed(replayed(count)):
        bottleneck = Fixed(FEATURES, LATENT).double()
        model = BottleneckedLinear(bottleneck, nn.Linear(FEATURES, CLASSES).double())
        features = torch.randn(count, FEATURES).double().requires_grad_()
        bottleneck.noise = torch.randn(count, LATENT).double()
    labels = torch.arange(count)
    loss = F.cross_entropy(model(features), labels) + penalty * bottleneck.take_divergence().mean()
    loss.backward()
    named = {name.removeprefix("bottleneck."): tensor for name, tensor in model.named_parameters()}
    weights = {name: tensor.detach() for name, tensor in named.items()}
    gradients = {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}
    assert features.grad is not None
    return Head(weights, gradients, penalty), bottleneck, features.detach(), features.grad, labels


@pytest.mark.parametrize("penalty", [0.0, 1e-3, 1.0])
def test_quotients_of_one_example_are_features_sample_and_noise(penalty: float) -> None:
    head, bottleneck, features, slopes, labels = bottlenecked(1, penalty)
    unit = int(head.gradients["encoder.bias"].abs().argmax())
    quotient = head.gradients["encoder.weight"][unit] / head.gradients["encoder.bias"][unit]
    unit = int(head.gradients["decoder.bias"].abs().argmax())
    sample = head.gradients["decoder.weight"][unit] / head.gradients["decoder.bias"][unit]
    mean, raw = bottleneck.encoder(quotient).detach().chunk(2)
    torch.testing.assert_close(quotient, features[0])
    torch.testing.assert_close((sample - mean) / F.softplus(raw), bottleneck.noise[0])
    for found in (head.solve_one(), head.solve(labels, rng=replayed(0))):
        assert found is not None
        assert found.misfit < 1e-6
        torch.testing.assert_close(found.features[0], quotient, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.slopes, slopes, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("penalty", [0.0, 1e-3])
def test_a_batch_is_solved_with_its_slopes(penalty: float) -> None:
    head, _, features, slopes, labels = bottlenecked(3, penalty)
    found = head.solve(labels, rng=replayed(0))
    assert found is not None
    assert found.misfit < 1e-5
    torch.testing.assert_close(found.features, features, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.slopes, slopes, rtol=1e-3, atol=1e-4)


def test_a_start_whose_decomposition_does_not_converge_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    head, _, features, _, labels = bottlenecked(3, 0.0)
    calls = undecomposed_once(monkeypatch)
    found = head.solve(labels, rng=replayed(0))
    assert calls[0] > 2
    assert found is not None
    torch.testing.assert_close(found.features, features, rtol=1e-3, atol=1e-4)


def test_too_many_examples_are_not_solved() -> None:
    head, *_, labels = bottlenecked(CLASSES, 0.0)
    assert head.solve(labels, rng=replayed(0)) is None


@pytest.mark.parametrize("form", ["adam", "adagrad", "yogi"])
@pytest.mark.parametrize("other", ["paper", "inside", "code"])
def test_the_gradient_behind_a_first_stand_in_by_hand(form: Literal["adam", "adagrad", "yogi"], other: str) -> None:
    """With r the stand-in, both moments from zero: g = e r / (a - |r|), or g = r sqrt(e / (a^2 - r^2)) inside."""
    beta1, beta2, epsilon = 0.8, 0.96, 1e-3
    gradient = torch.tensor([-2e-2, -1e-4, 3e-5, 4e-3, 1e-1], dtype=torch.float64)
    first, second = (1 - beta1) * gradient, (1.0 if form == "adagrad" else 1 - beta2) * gradient**2
    if other == "code":
        scale = 1e-3 * math.sqrt(1 - beta2) / (1 - beta1)
        top, below = 1e-3 * math.sqrt(1 - beta2), epsilon
        if form != "adagrad":
            top, below = 1e-3, epsilon / math.sqrt(1 - beta2)
        sent = scale * first / (second.sqrt() + epsilon)
    else:
        top, below = 1.0, epsilon
        sent = gradient / ((gradient**2 + epsilon).sqrt() if other == "inside" else gradient.abs() + epsilon)
    by_hand = below * sent / (top - sent.abs())
    if other == "inside":
        by_hand = sent * (below / (top**2 - sent**2)).sqrt()
    torch.testing.assert_close(by_hand, gradient)
    defense = AdaDefense(
        form=form,
        variant="code" if other == "code" else "paper",
        epsilon_inside=other == "inside",
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
    )
    torch.testing.assert_close(defense.stand_in({"w": gradient}, Moments().state)[0]["w"], sent)
    found = solved(Update({"w": sent}, "gradient"), defense, Moments())
    torch.testing.assert_close(found.tensors["w"], by_hand)
    assert bool(found.other["w"].isnan().all())
