from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from tests.defenses.steps import defended, defended_update, drawn_step, flat

from leaktight.defenses.noise import AdditiveNoise


@pytest.mark.parametrize("noise_std", [0.1, 3.0])
@pytest.mark.parametrize(
    ("distribution", "law"),
    [("gaussian", stats.norm), ("laplace", stats.laplace(scale=1 / math.sqrt(2)))],
    ids=["gaussian", "laplace"],
)
def test_the_noise_has_the_named_law_and_standard_deviation(noise_std: float, distribution: str, law: object) -> None:
    step = drawn_step((100, 300), (17,))
    outcome = defended(AdditiveNoise(distribution=distribution, noise_std=noise_std), step)  # type: ignore[arg-type]
    noise = (flat(outcome.tensors) - flat(step.gradient)).double().numpy() / noise_std
    assert stats.kstest(noise, law.cdf).pvalue > 1e-3  # type: ignore[attr-defined]
    assert noise.std() == pytest.approx(1, abs=0.03)
    assert outcome.figures["noise_std"] == noise_std


def test_the_published_laplace_scale_of_plato() -> None:
    step = drawn_step((200, 300))
    noise = flat(defended(AdditiveNoise(distribution="laplace", noise_std=0.1414), step).tensors) - flat(step.gradient)
    assert float(noise.abs().mean()) == pytest.approx(0.1, rel=0.02)  # the mean magnitude of Laplace noise is its scale


def test_noise_is_fresh_at_every_call_and_the_same_for_the_same_stream() -> None:
    step = drawn_step((30, 40), (1200,))
    first, again, other = (defended(AdditiveNoise(), step, seed=seed).tensors for seed in (0, 0, 1))
    assert torch.equal(first["0"], again["0"])
    noises = [(tensors["0"] - step.gradient["0"]).flatten() for tensors in (first, other)]
    noises.append(first["1"] - step.gradient["1"])
    correlations = torch.corrcoef(torch.stack(noises)) - torch.eye(3)
    assert float(correlations.abs().max()) < 4 / math.sqrt(1200)


def test_no_noise_is_the_identity() -> None:
    step = drawn_step((3, 4))
    outcome = defended(AdditiveNoise(noise_std=0), step)
    assert outcome.tensors["0"] is step.gradient["0"]
    update = defended_update(AdditiveNoise(noise_std=0, at="update"), step.gradient)
    assert update.tensors["0"] is step.gradient["0"]


@pytest.mark.parametrize("noise_std", [-0.1, math.nan, math.inf])
def test_impossible_noise_is_refused(noise_std: float) -> None:
    with pytest.raises(ValueError, match="expected noise_std >= 0"):
        AdditiveNoise(noise_std=noise_std)


def test_an_unknown_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'gaussian'"):
        AdditiveNoise(distribution="gausian")  # type: ignore[arg-type]
