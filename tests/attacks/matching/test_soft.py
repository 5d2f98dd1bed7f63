"""Soft max-pooling and soft ReLUs: hard ones in the limit, smooth before it, and searches that get further by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import nn

from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import SquaredError
from leaktight.attacks.matching.soft import Softened, SoftPool, SoftRelu, softened
from leaktight.attacks.matching.sought import Noise, Pixels
from leaktight.attacks.matching.spread import Parallel
from leaktight.attacks.matching.view import Simulation
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.config.catalogue import MODELS
from leaktight.core.tensors import rms
from leaktight.core.types import Batch, Observation
from leaktight.data.embedded import Photos
from leaktight.models.initialise import build_model


@settings(max_examples=30, deadline=None)
@given(
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    size=st.tuples(st.integers(7, 10), st.integers(7, 10)),
    padded=st.booleans(),
)
def test_at_a_low_temperature_it_is_max_pooling(
    kernel: int, stride: int, dilation: int, size: tuple[int, int], padded: bool
) -> None:
    pool = nn.MaxPool2d(kernel, stride, padding=kernel // 2 if padded else 0, dilation=dilation)
    inputs = torch.rand(2, 3, *size, generator=replayed(1).public(), dtype=torch.float64)
    torch.testing.assert_close(SoftPool(pool, 1e-6)(inputs), pool(inputs), atol=1e-5, rtol=0)


def test_at_a_high_temperature_it_is_the_mean_and_its_gradient_has_no_jumps() -> None:
    pool = nn.MaxPool2d(2)
    inputs = torch.rand(1, 2, 6, 6, generator=replayed(2).public(), dtype=torch.float64)
    torch.testing.assert_close(SoftPool(pool, 1e6)(inputs), nn.functional.avg_pool2d(inputs, 2), atol=1e-6, rtol=0)
    inputs.requires_grad_()
    assert torch.autograd.gradgradcheck(SoftPool(pool, 0.1), (inputs,))


@pytest.fixture(scope="module")
def victim() -> tuple[Observation, Batch]:
    data = Photos(size=32).load(Path())
    model = build_model(MODELS["grnn_lenet"](), data.inputs, data.num_classes, init="wide", rng=replayed(0))
    batch = draw(data, 1, seed=5)
    return replace(observe(model, batch, data.num_classes), labels=batch.targets), batch


SOFT = Softened(inner=Simulation())


def test_the_temperature_falls_in_equal_factors_and_the_observed_model_is_untouched(
    victim: tuple[Observation, Batch],
) -> None:
    seen, batch = victim
    view = SOFT.view(seen, 1, torch.float64, needs_scale=True)
    assert any(isinstance(module, nn.MaxPool2d) for module in seen.model.modules())
    assert not any(isinstance(module, nn.MaxPool2d) for module in view.trainer.model.modules())
    name = next(iter(view.annealed))
    ways = [float(view.buffers_at(torch.tensor(share), view.buffers)[name]) for share in (0.0, 0.5, 1.0)]
    assert ways == pytest.approx([0.1, (0.1 * 5e-4) ** 0.5, 5e-4])
    assert view.buffers_at(None, view.buffers) is view.buffers
    errors = []
    for share in (0.0, 0.5, 1.0):
        buffers = view.buffers_at(torch.tensor(share), view.buffers)
        guess = view.guess(batch.inputs.double(), batch.targets, view.params, buffers)
        errors.append(sum(float((guess[key] - tensor).square().sum()) for key, tensor in view.target.items()))
    assert errors[0] > 10 * errors[1] > 100 * errors[2], "the truth explains the update ever better"


def test_a_network_without_max_pooling_is_left_alone() -> None:
    data = Photos(size=32).load(Path())
    model = build_model(MODELS["lenet_zhu"](), data.inputs, data.num_classes, rng=replayed(0))
    seen = observe(model, draw(data, 1, seed=5), data.num_classes)
    view = SOFT.view(seen, 1, torch.float32, needs_scale=True)
    assert not view.annealed
    assert not any(isinstance(module, SoftPool) for module in view.trainer.model.modules())
    assert not view.notes


def test_a_search_takes_the_temperature_of_its_iteration(victim: tuple[Observation, Batch]) -> None:
    """The loss that the first iteration reports is that at the first temperature; at the end it is at the last."""
    seen, _ = victim
    attack = Matching(
        objective=SquaredError(),
        matched=SOFT,
        labels=Given(),
        sought=Pixels(start=Noise(distribution="uniform")),
        optimizer=Adam(learning_rate=1e-12),
        iterations=2,
        progress_every=1,
        keep="last",
        precision="float64",
        onednn=True,
    )
    losses: list[float] = []
    attack.reconstruct([seen], rng=replayed(1), progress=lambda _, loss, guess: losses.append(loss))
    evidence = attack.evidence([seen], rng=replayed(1))
    problem = attack.problem(evidence, replayed(1), [0], together=False)
    here = problem.start(problem.rngs[0])
    expected = [float(problem.loss(here, {}, problem.constants, torch.tensor(share))) for share in (0.0, 0.5)]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)


def test_a_soft_relu_is_smooth_and_a_relu_at_a_low_temperature() -> None:
    inputs = torch.linspace(-2, 2, 41, dtype=torch.float64)
    torch.testing.assert_close(SoftRelu(1e-6).double()(inputs), inputs.relu(), atol=1e-6, rtol=0)
    assert torch.autograd.gradgradcheck(SoftRelu(0.3).double(), (inputs.requires_grad_(),))


@pytest.fixture(scope="module")
def rectified() -> tuple[Observation, Batch]:
    """An update of a ResNet whose blocks share one ReLU, in evaluation mode."""
    data = Photos(size=16).load(Path())
    model = build_model(MODELS["resnet20"](), data.inputs, data.num_classes, rng=replayed(0))
    batch = draw(data, 1, seed=5)
    return replace(observe(model, batch, data.num_classes, mode="eval"), labels=batch.targets), batch


def test_every_relu_is_softened_and_the_truth_explains_the_update_ever_better(
    rectified: tuple[Observation, Batch],
) -> None:
    seen, batch = rectified
    view = Softened(inner=Simulation(), layers="relu", first=0.3, last=0.001).view(
        seen, 1, torch.float64, needs_scale=True
    )
    assert any(isinstance(module, nn.ReLU) for module in seen.model.modules())
    assert not any(isinstance(module, nn.ReLU) for module in view.trainer.model.modules())
    errors = []
    for share in (0.0, 0.5, 1.0):
        guess = view.guess(
            batch.inputs.double(), batch.targets, view.params, view.buffers_at(torch.tensor(share), view.buffers)
        )
        errors.append(sum(float((guess[key] - tensor).square().sum()) for key, tensor in view.target.items()))
    assert errors[0] > 10 * errors[1] > 100 * errors[2]


def test_a_search_with_soft_relus_gets_nearer_to_the_update(rectified: tuple[Observation, Batch]) -> None:
    """By the distance with hard ReLUs, of both."""
    seen, _ = rectified
    hard = InvertingGradients(iterations=150, learning_rate=0.1, decay="cosine", labels=Given(), onednn=True)
    judge = hard.matching()
    problem = judge.problem(judge.evidence([seen], rng=replayed(1)), replayed(1), [0], together=False)
    distances = [
        problem.distance({"images": attack.reconstruct([seen], rng=replayed(1)).guess.inputs.clamp(0, 1)})
        for attack in (hard, replace(hard, soft_relus=0.3))
    ]
    assert distances[1] < 0.5 * distances[0]


def observed_by(model: nn.Module) -> Observation:
    data = Photos(size=16).load(Path())
    return observe(model, draw(data, 1, seed=5), data.num_classes)


def test_a_relu_that_stands_twice_in_one_container_is_softened_twice_and_one_in_place_stays() -> None:
    relu, first, second, third = nn.ReLU(), nn.Conv2d(3, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)
    model = nn.Sequential(first, relu, second, relu, third, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(200, 10))
    view = Softened(inner=Simulation(), layers="relu").view(observed_by(model), 1, torch.float64, needs_scale=True)
    assert list(view.annealed) == ["1.temperature", "3.temperature"]
    kinds = [type(layer) for layer in view.trainer.model.children()]
    assert kinds.count(SoftRelu) == 2
    assert kinds.count(nn.ReLU) == 1


def test_temperatures_are_in_units_of_what_enters_a_relu() -> None:
    """So that a setting means the same in networks with large and with small values; the units are those of noise."""
    first = nn.Conv2d(3, 2, 3)
    model = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(392, 10))
    soft = Softened(inner=Simulation(), layers="relu", first=0.3, last=0.02)
    before = soft.view(observed_by(model), 1, torch.float64, needs_scale=True).annealed["1.temperature"]
    noise = torch.rand(2000, 3, 16, 16, generator=replayed(3).public())
    assert before[0] == pytest.approx(0.3 * rms(first(noise).detach()), rel=0.05)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.mul_(50)
    after = soft.view(observed_by(model), 1, torch.float64, needs_scale=True).annealed["1.temperature"]
    assert after == pytest.approx([50 * each for each in before], rel=1e-4)


def test_a_network_without_relus_is_said_to_have_none() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(392, 10))
    view = Softened(inner=Simulation(), layers="relu").view(observed_by(model), 1, torch.float64, needs_scale=True)
    assert not view.annealed
    assert list(view.notes) == ["no relu to soften"]


@pytest.mark.parametrize(
    ("coarse", "restarts", "parallel"), [(0, 1, "none"), (0, 2, "none"), (2, 2, "none"), (0, 2, "processes")]
)
def test_a_search_that_does_not_move_has_not_lowered_its_loss(
    rectified: tuple[Observation, Batch], coarse: int, restarts: int, parallel: Parallel
) -> None:
    """Although the temperature falls meanwhile, which changes the loss of the same images."""
    seen, _ = rectified
    preset = InvertingGradients(
        iterations=2, learning_rate=1e-12, soft_relus=0.3, precision="float64", labels=Given(), onednn=True
    )
    sought = Pixels(start=Noise(distribution="uniform"), coarse=coarse)
    attack = replace(
        preset.matching(), sought=sought, restarts=restarts, parallel=parallel, progress_every=1, check_every=1
    )
    found = attack.reconstruct([seen], rng=replayed(1))
    assert found.first_loss == pytest.approx(found.loss, rel=1e-6)
    losses = [loss for _, loss in found.history]
    assert max(losses) > 1.05 * min(losses), "as they were at the temperature of their iteration"


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="expected 0 < last <= first"):
        Softened(inner=Simulation(), first=0.1, last=0.2)
    with pytest.raises(ValueError, match="soft_relus"):
        InvertingGradients(soft_relus=-0.1)
    assert softened(SOFT, "relu", 0.0) is SOFT
