"""MSE, PSNR and SSIM against closed forms, scikit-image, and SSIM's definition window by window."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from skimage import metrics as skimage_metrics
from tests.seeds import replayed
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from leaktight.core.errors import UsageError
from leaktight.metrics import mse, psnr, ssim
from leaktight.metrics.windows import Windows

FUNCTIONS = [mse, psnr, ssim]

# scikit-image has no types.
structural_similarity: Callable[..., float] = skimage_metrics.structural_similarity
mean_squared_error: Callable[..., float] = skimage_metrics.mean_squared_error
peak_signal_noise_ratio: Callable[..., float] = skimage_metrics.peak_signal_noise_ratio


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=replayed(seed).public(), dtype=torch.float64)


def noisy_pair(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    truth = noise(*shape, seed=seed)
    return (truth + 0.3 * noise(*shape, seed=seed + 1)).clamp(0, 1), truth


def test_constant_difference_in_closed_form() -> None:
    truth = torch.full((3, 3, 4, 4), 0.25)
    guess = truth + torch.tensor([0.5, 0.25, 0.125]).view(3, 1, 1, 1)
    assert mse(guess, truth).tolist() == [0.25, 0.0625, 0.015625]
    assert psnr(guess, truth).tolist() == pytest.approx([20 * math.log10(k) for k in (2, 4, 8)], abs=1e-12)


def test_ssim_of_flat_images_in_closed_form() -> None:
    """Without contrast only the luminance term is left."""
    a, b, c1 = 0.2, 0.7, 0.01**2
    value = ssim(torch.full((1, 1, 16, 16), a), torch.full((1, 1, 16, 16), b))
    assert float(value) == pytest.approx((2 * a * b + c1) / (a * a + b * b + c1), rel=1e-6)


def test_identical_images() -> None:
    truth = noise(2, 3, 12, 12)
    assert mse(truth, truth).tolist() == [0, 0]
    assert psnr(truth, truth).tolist() == [100, 100]
    assert ssim(truth, truth).tolist() == pytest.approx([1, 1], abs=1e-12)


def test_values_are_clamped_first() -> None:
    truth = noise(2, 3, 12, 12)
    guess = 3 * noise(2, 3, 12, 12, seed=1) - 1
    for function in FUNCTIONS:
        assert torch.equal(function(guess, truth), function(guess.clamp(0, 1), truth))
        assert not torch.equal(function(guess, truth), function(guess / 3, truth))


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (2, 1, 28, 28), (1, 3, 11, 17)])
def test_agrees_with_scikit_image(shape: tuple[int, ...]) -> None:
    guess, truth = noisy_pair(*shape)
    for row, (g, t) in enumerate(zip(guess.numpy(), truth.numpy(), strict=True)):
        theirs = structural_similarity(
            t, g, channel_axis=0, data_range=1.0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        assert float(ssim(guess, truth)[row]) == pytest.approx(theirs, abs=1e-9)
        assert float(mse(guess, truth)[row]) == pytest.approx(mean_squared_error(t, g), abs=1e-12)
        assert float(psnr(guess, truth)[row]) == pytest.approx(peak_signal_noise_ratio(t, g, data_range=1), abs=1e-9)


@pytest.mark.parametrize(("side", "radius"), [(3, 1), (4, 1), (8, 3), (10, 4), (11, 5), (28, 5)])
def test_ssim_window_shrinks_with_small_images(side: int, radius: int) -> None:
    guess, truth = noisy_pair(1, 1, side, side + 2)
    theirs = structural_similarity(
        truth[0, 0].numpy(),
        guess[0, 0].numpy(),
        data_range=1.0,
        gaussian_weights=True,
        sigma=0.3 * radius,
        use_sample_covariance=False,
    )
    assert float(ssim(guess, truth)) == pytest.approx(theirs, abs=1e-9)


def test_ssim_by_definition() -> None:
    """One window at a time, weighted means and variances as in the paper."""
    guess, truth = noisy_pair(1, 1, 13, 12)
    offsets = np.arange(-5, 6)
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None, :] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    values = []
    for top in range(3):
        for left in range(2):
            x, y = (image[0, 0, top : top + 11, left : left + 11].numpy() for image in (guess, truth))
            mean_x, mean_y = (weights * x).sum(), (weights * y).sum()
            var_x, var_y = (weights * (x - mean_x) ** 2).sum(), (weights * (y - mean_y) ** 2).sum()
            cov = (weights * (x - mean_x) * (y - mean_y)).sum()
            light = (2 * mean_x * mean_y + 1e-4) / (mean_x**2 + mean_y**2 + 1e-4)
            values.append(light * (2 * cov + 9e-4) / (var_x + var_y + 9e-4))
    assert float(ssim(guess, truth)) == pytest.approx(np.mean(values), abs=1e-9)


def test_ssim_is_torchmetrics_map_without_the_mirrored_border() -> None:
    guess, truth = noisy_pair(2, 3, 20, 20)
    _, full = structural_similarity_index_measure(guess, truth, data_range=1.0, return_full_image=True)
    assert torch.allclose(ssim(guess, truth), full[:, :, 5:-5, 5:-5].mean((1, 2, 3)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_score_per_example_whatever_stands_beside_it(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    guess, truth = noisy_pair(3, 3, 12, 12)
    before = guess.clone(), truth.clone()
    together = function(guess, truth)
    assert together.shape == (3,)
    assert together.dtype == torch.float64
    for row in range(3):
        one = function(guess[row : row + 1], truth[row : row + 1])
        assert float(one) == pytest.approx(float(together[row]), abs=1e-12)
    assert torch.equal(guess, before[0])
    assert torch.equal(truth, before[1])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nan_shows(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    guess, truth = noisy_pair(2, 1, 12, 12)
    guess[1, 0, 6, 6] = math.nan
    assert function(guess, truth).isnan().tolist() == [False, True]


@given(seed=st.integers(0, 10**6), channels=st.sampled_from([1, 3]), side=st.integers(3, 14))
def test_ranges_and_symmetry(seed: int, channels: int, side: int) -> None:
    guess, truth = noise(2, channels, side, side, seed=seed), noise(2, channels, side, side, seed=seed + 1)
    for function, low, high in ((mse, 0, 1), (psnr, 0, 100), (ssim, -1, 1)):
        scores = function(guess, truth)
        assert torch.allclose(scores, function(truth, guess), atol=1e-12)
        assert bool(((scores >= low) & (scores <= high)).all())


@pytest.mark.parametrize(
    ("guess", "truth", "words"),
    [
        (torch.zeros(2, 1, 8, 8), torch.zeros(1, 1, 8, 8), "match them first"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, 1, 8, 8, dtype=torch.uint8), "divide bytes by 255"),
        (torch.zeros(1, 8, 8), torch.zeros(1, 8, 8), "expected images"),
        (torch.zeros(0, 1, 8, 8), torch.zeros(0, 1, 8, 8), "expected images"),
    ],
)
def test_wrong_inputs_are_named(guess: Tensor, truth: Tensor, words: str) -> None:
    for function in FUNCTIONS:
        with pytest.raises(UsageError, match=words):
            function(guess, truth)


def test_ssim_refuses_images_without_a_window() -> None:
    with pytest.raises(UsageError, match="at least 3 x 3"):
        ssim(torch.zeros(1, 1, 2, 9), torch.zeros(1, 1, 2, 9))


@pytest.mark.parametrize("shape", [(4, 1, 28, 28), (3, 3, 17, 32), (2, 1, 8, 8), (2, 1, 3, 5)])
def test_windows_that_are_summed_up_once_give_the_same_ssim(shape: tuple[int, ...]) -> None:
    guess, truth = noisy_pair(*shape)
    guess[-1] = truth[-1]
    found = Windows.of(guess).ssim(Windows.of(truth))
    assert found.tolist() == pytest.approx(ssim(guess, truth).tolist(), abs=1e-4)
    places = torch.tensor([1, 0, 1])
    pairs = Windows.of(guess).take(places).ssim(Windows.of(truth).take(places.flip(0)))
    assert pairs.tolist() == pytest.approx(ssim(guess[places], truth[places.flip(0)]).tolist(), abs=1e-4)


def test_windows_need_three_pixels() -> None:
    with pytest.raises(UsageError, match="at least 3 x 3 pixels"):
        Windows.of(torch.rand(1, 1, 2, 5))
