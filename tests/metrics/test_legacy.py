"""The published conventions reproduce published numbers, and differ from the true metrics as they should."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.seeds import replayed
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.metrics import METRICS, legacy, mse, psnr


def pair(seed: int = 0, channels: int = 3) -> tuple[Tensor, Tensor]:
    generator = replayed(seed).public()
    guess, truth = (torch.rand(3, channels, 8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return guess, truth


def bytes_apart(rmse: float) -> tuple[Tensor, Tensor]:
    """Two images of bytes whose RMSE is close to this one: pixels differ by the whole number below it or above it."""
    low = math.floor(rmse)
    share = (rmse**2 - low**2) / ((low + 1) ** 2 - low**2)
    gaps = torch.full((10_000,), float(low), dtype=torch.float64)
    gaps[: round(share * 10_000)] += 1
    return (gaps / 255).view(1, 1, 100, 100), torch.zeros(1, 1, 100, 100, dtype=torch.float64)


def test_fedkl_table_value() -> None:
    """The table prints 173.44 and 25.74 dB; the true PSNR is 3.35 dB."""
    guess, truth = bytes_apart(173.44)
    assert float(legacy.fedkl_rmse(guess, truth)) == pytest.approx(173.44, abs=0.005)
    assert round(float(legacy.fedkl_psnr(guess, truth)), 2) == 25.74
    assert round(float(psnr(guess, truth)), 2) == 3.35


def test_thesis_table_value() -> None:
    """The table prints 4107.9 and 11.99 dB."""
    truth = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    guess = truth + math.sqrt(4107.9) / 255
    assert float(legacy.thesis_mse_255(guess, truth)) == pytest.approx(4107.9)
    assert round(float(legacy.thesis_psnr(guess, truth)), 2) == 11.99
    assert torch.allclose(legacy.thesis_psnr(*pair()), psnr(*pair()))


def test_ggl_lies_six_decibels_below() -> None:
    assert torch.allclose(legacy.ggl_mse(*pair()), (2 * pair()[0] - 2 * pair()[1]).square().flatten(1).mean(1))
    assert torch.allclose(legacy.ggl_psnr(*pair()), psnr(*pair()) - 20 * math.log10(2))


@given(seed=st.integers(0, 10**6))
def test_grnn_lies_between_mse_and_its_root(seed: int) -> None:
    guess, truth = pair(seed)
    value = legacy.grnn_mae(guess, truth)
    assert bool((mse(guess, truth) <= value).all())
    assert bool((value <= mse(guess, truth).sqrt()).all())


def test_grnn_by_hand() -> None:
    guess = torch.tensor([0.5, 0.0]).view(1, 1, 1, 2)
    assert float(legacy.grnn_mae(guess, torch.zeros(1, 1, 1, 2))) == 0.25


def test_fedkl_rounds_to_bytes() -> None:
    truth = torch.zeros(1, 1, 2, 2)
    assert float(legacy.fedkl_rmse(truth + 0.4 / 255, truth)) == 0
    assert float(legacy.fedkl_rmse(truth + 0.6 / 255, truth)) == 1


def test_inverting_gradients_is_the_psnr_for_one_channel_within_range() -> None:
    guess, truth = pair(channels=1)
    assert torch.allclose(legacy.ig_psnr_normalised(guess, truth), psnr(guess, truth))
    assert bool((legacy.ig_psnr_normalised(guess + 1, truth) < psnr(guess + 1, truth)).all())


def test_inverting_gradients_channel_by_channel() -> None:
    """As the published code goes: one MSE of the normalised image, one peak per channel, then the mean."""
    guess, truth = pair()
    mean, std = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1), torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1)
    for row, value in enumerate(legacy.ig_psnr_normalised(guess, truth, std=std.flatten().tolist())):
        error = ((guess[row] - mean) / std - (truth[row] - mean) / std).square().mean()
        assert float(value) == pytest.approx(float((10 * torch.log10((1 / std) ** 2 / error)).mean()), abs=1e-5)


def test_plato_takes_the_nearest_truth_unclamped() -> None:
    _, truth = pair()
    copies = truth[[1, 1, 1]] + 0.1
    value = legacy.plato_min_mse(copies, truth, std=[0.5] * 3)
    assert value.tolist() == pytest.approx([0.04] * 3)
    assert float(legacy.plato_min_mse(truth[:1] + 1e4, truth).min()) > 1e9
    assert legacy.plato_min_mse(truth[:2], truth).tolist() == [0, 0]
    assert torch.allclose(legacy.plato_psnr_2022(copies, truth), -10 * legacy.plato_min_mse(copies, truth).log10())


def test_default_std_follows_the_channels() -> None:
    truth = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    assert float(legacy.plato_min_mse(truth + 0.3248, truth)) == pytest.approx(1)
    with pytest.raises(UsageError, match="each of 2 channels"):
        legacy.plato_min_mse(torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, 2))


@pytest.mark.parametrize("name", [name for name, spec in METRICS.items() if spec.legacy])
def test_says_what_it_is_for(name: str) -> None:
    text = " ".join((getattr(legacy, name).__doc__ or "").split())
    assert "or comparing with published tables only" in text
    assert "Wrong with it:" in text


@pytest.mark.parametrize("name", [name for name, spec in METRICS.items() if spec.legacy])
def test_identical_images_score_finite(name: str) -> None:
    guess, truth = pair()
    same, other = getattr(legacy, name)(truth, truth), getattr(legacy, name)(guess, truth)
    assert bool(same.isfinite().all())
    better = same > other if METRICS[name].leaks_when == "high" else same < other
    assert bool(better.all())
