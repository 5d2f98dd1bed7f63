"""Soft pooling: the maximum in the limit, smooth before it, and a search that gets further by it."""

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

from leaktight.attacks.generative.grnn import Softened, SoftPool
from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import SquaredError
from leaktight.attacks.matching.sought import Noise, Pixels
from leaktight.attacks.matching.view import Simulation
from leaktight.attacks.optimizers.descent import Adam
from leaktight.config.catalogue import MODELS
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


def test_bad_temperatures() -> None:
    with pytest.raises(ValueError, match="expected 0 < last <= first"):
        Softened(inner=Simulation(), first=0.1, last=0.2)
