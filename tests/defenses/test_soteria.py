from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.defenses.steps import batch, defended, network, step_of
from tests.seeds import replayed
from torch import Tensor, nn

import leaktight.defenses.soteria as soteria
from leaktight.config.catalogue import MODELS
from leaktight.core.errors import LeaktightError, ModelError
from leaktight.core.inputs import Images
from leaktight.core.protocols import ClientFacts, Step
from leaktight.core.rng import global_seed
from leaktight.core.types import Batch
from leaktight.defenses.soteria import Soteria, feature_scores
from leaktight.models.initialise import build_model


def naive_scores(step: Step, features: nn.Module) -> Tensor:
    """One backward pass for every feature of every example, one after the other."""
    scores = []
    inputs = step.batch.inputs.clone().requires_grad_()
    entered = features(inputs)
    for place in range(entered.shape[1]):
        total = torch.zeros((), dtype=inputs.dtype)
        for row in range(len(inputs)):
            (gradient,) = torch.autograd.grad(entered[row, place], inputs, retain_graph=True)
            if gradient.norm() > 0:
                total = total + gradient.norm() / entered[row, place].detach()
        scores.append(total.abs())
    return torch.stack(scores)


@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.ReLU(), nn.Tanh()])
@pytest.mark.parametrize("chunk", [1, 2**20])
def test_scores_are_those_of_a_loop_over_examples_and_features(
    activation: nn.Module, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soteria, "_CHUNK_ELEMENTS", chunk)
    model = network()
    assert isinstance(model, nn.Sequential)
    model[1] = activation
    step = step_of(model, batch(3))
    name, scores = feature_scores(step)
    assert name == "3"
    torch.testing.assert_close(scores, naive_scores(step, model[:3]))


def test_the_columns_of_the_lowest_scores_are_zeroed_and_all_else_is_exact() -> None:
    step = step_of(network(), batch(4))
    outcome = defended(Soteria(prune_share=0.6), step)
    _, scores = feature_scores(step)
    lowest = scores.argsort()[: math.ceil(0.6 * 63)]
    pruned = torch.zeros(64, dtype=torch.bool)
    pruned[lowest] = True
    assert not bool(outcome.tensors["3.weight"][:, pruned].any())
    assert torch.equal(outcome.tensors["3.weight"][:, ~pruned], step.gradient["3.weight"][:, ~pruned])
    for name in ("0.weight", "0.bias", "3.bias"):
        assert outcome.tensors[name] is step.gradient[name]
    assert outcome.figures["fraction_zeroed"] == pytest.approx(38 / 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_scores_in_float32_and_gradients_in_its_own_type(dtype: torch.dtype) -> None:
    examples = batch(4)
    step = step_of(network().to(dtype), Batch(examples.inputs.to(dtype), examples.targets))
    assert feature_scores(step)[1].dtype == torch.float32
    outcome = defended(Soteria(prune_share=0.6), step)
    assert outcome.tensors["3.weight"].dtype == dtype
    assert int((outcome.tensors["3.weight"] == 0).all(0).sum()) == pytest.approx(38, abs=1)


def test_no_pruning_is_the_identity() -> None:
    step = step_of(network(), batch(2))
    outcome = defended(Soteria(prune_share=0), step)
    assert all(outcome.tensors[name] is tensor for name, tensor in step.gradient.items())


def test_epsilon_joins_the_denominator() -> None:
    step = step_of(network(), batch(1))
    _, plain = feature_scores(step)
    _, damped = feature_scores(step, 0.1)
    model = step.model
    assert isinstance(model, nn.Sequential)
    features = model[:3](step.batch.inputs)[0].detach()
    torch.testing.assert_close(damped, plain * features / (features + 0.1))


def test_batch_norm_in_training_is_used_and_left_alone() -> None:
    with global_seed(replayed(0)):
        model = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sigmoid(), nn.Flatten(), nn.Linear(32, 3)
        ).double()
    step = step_of(model, batch(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = defended(Soteria(), step)
    assert outcome.figures["fraction_zeroed"] == pytest.approx(0.5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("kind", ["lenet_zhu", "resnet20", "logistic_regression"])
def test_models_of_the_catalogue_that_end_in_a_linear_layer(kind: str) -> None:
    shape = Images(1, 8, 8) if kind == "logistic_regression" else Images(3, 32, 32)
    model = build_model(MODELS[kind](), shape, 3, init="default", rng=replayed(0))
    generator = replayed(1).public()
    examples = Batch(torch.rand(2, *shape.shape, generator=generator), torch.randint(3, (2,), generator=generator))
    outcome = defended(Soteria(prune_share=0.5), step_of(model, examples))
    assert outcome.figures["fraction_zeroed"] == pytest.approx(0.5, abs=0.02)


def test_a_model_without_a_linear_layer_is_refused_at_the_start() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()).double()
    with pytest.raises(ModelError, match="linear layer"):
        Soteria().start(model, ClientFacts("a", 10, 3), rng=replayed(0))
    with pytest.raises(ModelError, match="linear layer"):
        feature_scores(step_of(model, batch(2)))


def test_features_that_are_sequences_are_refused() -> None:
    class Rows(nn.Module):
        """A linear layer on each row of an image."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.head(inputs[:, 0]).mean(1)
            return outputs

    with pytest.raises(ModelError, match=r"\(N, features\), at the last linear layer 'head', got 2 x 6 x 6"):
        defended(Soteria(), step_of(Rows().double(), batch(2)))


def test_a_frozen_last_layer_is_refused() -> None:
    step = step_of(network(), batch(2))
    rest = {name: tensor for name, tensor in step.gradient.items() if not name.startswith("3")}
    with pytest.raises(ModelError, match="'3', which is frozen"):
        defended(Soteria(), replace(step, gradient=rest))


def test_what_is_not_finite_is_an_error() -> None:
    step = step_of(network(), batch(2))
    broken = {**step.gradient, "3.weight": step.gradient["3.weight"].clone().fill_(math.nan)}
    with pytest.raises(LeaktightError, match=r"'3\.weight' is not finite"):
        defended(Soteria(), replace(step, gradient=broken))
    spoilt = Batch(torch.full_like(step.batch.inputs, math.nan), step.batch.targets)
    with pytest.raises(LeaktightError, match="features of the batch are not finite"):
        defended(Soteria(), replace(step, batch=spoilt))


@pytest.mark.parametrize(
    "settings", [{"prune_share": -0.1}, {"prune_share": 1.5}, {"prune_share": math.nan}, {"epsilon": -1}]
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Soteria(**settings)
