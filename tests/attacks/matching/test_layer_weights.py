"""AGIC's layer weights: the functions of its Table I, the order of layers, the ReLU modifier."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.attacks.matching.layer_weights import WEIGHTINGS, counted_layers, curve_weights, layer_weights
from leaktight.attacks.matching.objectives import Cosine, LayerCosine
from leaktight.core.inputs import Images
from leaktight.models.initialise import build_model
from leaktight.models.resnet import ResNet20x4
from leaktight.models.small import LeNetZhu, Mlp
from leaktight.models.vit import Vit

CIFAR = Images(3, 32, 32)
TABLE = [name for name in WEIGHTINGS if name != "equal"]


def ones(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}


def test_the_table_has_six_functions() -> None:
    assert len(TABLE) == 6


@pytest.mark.parametrize("weighting", TABLE)
def test_the_ends_are_those_of_table_1(weighting: str) -> None:
    weights = curve_weights(weighting, 2.0, 21)
    assert len(weights) == 21
    assert weights[0] == 1
    assert weights[-1] == pytest.approx(2.0 if weighting.startswith("increase") else 0.5)


@pytest.mark.parametrize("weighting", TABLE)
def test_the_expressions_are_those_of_table_1(weighting: str) -> None:
    """a f(x) + b with the same a and b at every place: f is x, log x or e^x."""
    direction, function = weighting.split("_")
    functions: dict[str, Callable[[float], float]] = {"linear": float, "log": math.log, "exp": math.exp}
    f = functions[function]
    weights = curve_weights(weighting, 2.0, 21)
    a = (weights[-1] - weights[0]) / (f(21) - f(1))
    assert (a > 0) == (direction == "increase")
    assert weights == pytest.approx([a * (f(x) - f(1)) + 1 for x in range(1, 22)])


@pytest.mark.parametrize(
    ("weighting", "bend"), [("decrease_log", 1), ("decrease_exp", -1), ("increase_exp", 1), ("increase_log", -1)]
)
def test_convexity_is_that_of_table_1(weighting: str, bend: int) -> None:
    weights = torch.tensor(curve_weights(weighting, 2.0, 10), dtype=torch.float64)
    assert bool((weights.diff(n=2) * bend > 0).all())


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_very_deep_and_very_shallow_networks(weighting: str) -> None:
    assert all(math.isfinite(weight) for weight in curve_weights(weighting, 50.0, 2000))
    assert curve_weights(weighting, 50.0, 1) == [1.0]


def test_equal_weights_are_one() -> None:
    assert curve_weights("equal", 50.0, 4) == [1.0] * 4


def test_linear_weights_follow_equation_7() -> None:
    assert curve_weights("increase_linear", 50.0, 21)[10] == pytest.approx(1 + 49 / 20 * 10)


def test_resnet20_4_counts_21_convolutions_with_their_norms() -> None:
    model = build_model(ResNet20x4(), CIFAR, 10, rng=replayed(0))
    layers = counted_layers(model, CIFAR.shape)
    assert len(layers) == 21
    assert layers[0] == ("conv1", "bn1")
    assert layers[-1] == ("layer3.2.conv2", "layer3.2.bn2")
    weights = layer_weights(model, CIFAR.shape, ones(model), weighting="increase_linear", beta=50.0, relu_modifier=True)
    assert weights["conv1.weight"] == weights["bn1.bias"] == 1
    assert weights["layer3.2.conv2.weight"] == weights["layer3.2.bn2.weight"] == pytest.approx(50)
    assert weights["fc.weight"] == weights["fc.bias"] == pytest.approx(25.5)
    projections = [place for place, names in enumerate(layers) if "downsample" in names[0]]
    assert [weights[f"{layers[place][0]}.weight"] for place in projections] == pytest.approx(
        [1 + 49 / 20 * place for place in projections]
    )


class Reversed(nn.Module):
    """Layers registered in the opposite of the order in which they run."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(reversed(layers))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            inputs = layer(inputs)
        return inputs


def test_the_order_is_that_of_running_not_of_registration() -> None:
    model = Reversed(nn.Conv2d(3, 2, 3), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(2 * 28 * 28, 5))
    assert counted_layers(model, CIFAR.shape) == [("layers.3",), ("layers.2",)]
    dense = Reversed(nn.Flatten(), nn.Linear(3072, 7), nn.Linear(7, 5))
    assert counted_layers(dense, CIFAR.shape) == [("layers.1",), ("layers.0",)]


def test_networks_without_convolutions_have_their_linear_layers_counted() -> None:
    model = build_model(Mlp(), CIFAR, 10, rng=replayed(0))
    weights = layer_weights(model, CIFAR.shape, ones(model), weighting="increase_linear", beta=3.0, relu_modifier=True)
    assert list(weights.values()) == pytest.approx([1, 1, 2, 2, 3, 3])


def test_every_tensor_of_a_transformer_has_a_weight() -> None:
    model = build_model(Vit(), CIFAR, 10, rng=replayed(0))
    weights = layer_weights(model, CIFAR.shape, ones(model), weighting="increase_log", beta=3.0, relu_modifier=True)
    assert set(weights) == set(dict(model.named_parameters()))
    assert set(weights.values()) == {1.0}


def test_the_modifier_makes_up_for_exact_zeros_in_the_target() -> None:
    model = build_model(LeNetZhu(), CIFAR, 10, rng=replayed(0))
    target = ones(model)
    weight, bias = target["features.2.weight"], target["features.2.bias"]
    weight.view(-1)[: weight.numel() // 4] = 0
    target["features.4.weight"] = torch.zeros_like(target["features.4.weight"])
    target["features.4.bias"] = torch.zeros_like(target["features.4.bias"])
    target["classifier.weight"] = torch.zeros_like(target["classifier.weight"])
    weights = layer_weights(model, CIFAR.shape, target, weighting="increase_linear", beta=3.0, relu_modifier=True)
    total = weight.numel() + bias.numel()
    modifier = total / (total - weight.numel() // 4)
    assert weights["features.0.weight"] == 1
    assert weights["features.2.weight"] == weights["features.2.bias"] == pytest.approx(2 * modifier)
    assert weights["features.4.weight"] == pytest.approx(3)  # nothing left to match: no division by zero
    assert weights["classifier.weight"] == pytest.approx(2)  # the mean of l, without the modifier
    plain = layer_weights(model, CIFAR.shape, target, weighting="increase_linear", beta=3.0, relu_modifier=False)
    assert plain["features.2.weight"] == pytest.approx(2)


def test_the_weighted_cosine_is_equation_6() -> None:
    model = build_model(LeNetZhu(), CIFAR, 10, rng=replayed(0))
    generator = replayed(1).public()
    guess, target = (
        {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in model.named_parameters()}
        for _ in range(2)
    )
    objective = LayerCosine(beta=50.0)
    alpha = layer_weights(model, CIFAR.shape, target, weighting="increase_linear", beta=50.0, relu_modifier=True)

    def product(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
        return sum(alpha[name] * float((left[name] * right[name]).sum()) for name in alpha)

    expected = 1 - product(guess, target) / math.sqrt(product(guess, guess) * product(target, target))
    assert float(objective.loss(guess, objective.prepare(target, model, CIFAR.shape))) == pytest.approx(
        expected, rel=1e-12
    )
    equal = LayerCosine(weighting="equal")
    plain = Cosine().loss(guess, Cosine().prepare(target, model, CIFAR.shape))
    assert float(equal.loss(guess, equal.prepare(target, model, CIFAR.shape))) == pytest.approx(float(plain), rel=1e-12)


def test_looking_at_the_order_leaves_the_model_as_it_was() -> None:
    model = build_model(ResNet20x4(), CIFAR, 10, rng=replayed(0)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    counted_layers(model, CIFAR.shape)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
