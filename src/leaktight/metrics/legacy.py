"""Metrics of published code, by name. For comparing with published tables only.

Each maps guesses and truths (N, C, H, W), nominally in [0, 1], to (N,). If the published code does not match guesses
with truths, call the function directly instead of through `score`. Identical images have an MSE of 1e-10 of the squared
peak, as in `psnr`, where the published code has infinity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.metrics.image import MIN_MSE, as_images, image_pair, mse, psnr_of

IMAGENET_STD = (0.229, 0.224, 0.225)
EMNIST_STD = (0.3248,)
_STD_BY_CHANNELS = {len(std): std for std in (IMAGENET_STD, EMNIST_STD)}


def grnn_mae(guess: Tensor, truth: Tensor) -> Tensor:
    """The mean absolute error on [0, 1], which GRNN's code logs as "mses". For comparing with published tables only.

    Wrong with it: it is not an MSE; as errors are at most 1, it is never below the MSE.
    """
    guess, truth = image_pair(guess, truth)
    return (guess - truth).abs().flatten(1).mean(1)


def thesis_mse_255(guess: Tensor, truth: Tensor) -> Tensor:
    """The MSE on 0..255 of the thesis's chapter on GRNN. For comparing with published tables only.

    Wrong with it: nothing but the unit; it is 65025 times `mse`.
    """
    return 255**2 * mse(guess, truth)


def thesis_psnr(guess: Tensor, truth: Tensor) -> Tensor:
    """10 log10(255^2 / MSE) with the MSE on 0..255. For comparing with published tables only.

    Wrong with it: nothing; it equals `psnr`, under the name of the table's column.
    """
    return psnr_of(thesis_mse_255(guess, truth), peak=255)


def fedkl_rmse(guess: Tensor, truth: Tensor) -> Tensor:
    """The root of the MSE of bytes, printed as "MSE" by FedKL and AdaDefense. For comparing with published tables only.

    Wrong with it: it is the root of the MSE, not the MSE. Images are rounded to the nearest byte.
    """
    guess, truth = (images.mul(255).round() for images in image_pair(guess, truth))
    return (guess - truth).square().flatten(1).mean(1).sqrt()


def fedkl_psnr(guess: Tensor, truth: Tensor) -> Tensor:
    """10 log10(255^2 / RMSE) of FedKL and AdaDefense. For comparing with published tables only.

    Wrong with it: the RMSE in place of the MSE, which adds 10 log10(RMSE): a "25.74 dB" is 3.35 dB.
    """
    rmse = fedkl_rmse(guess, truth).clamp_min(255 * MIN_MSE**0.5)
    return 10 * (255**2 / rmse).log10()


def ggl_mse(guess: Tensor, truth: Tensor) -> Tensor:
    """The MSE of GGL and LRP, of images in [-1, 1]. For comparing with published tables only.

    Wrong with it: nothing but the unit; it is 4 times `mse`.
    """
    return 4 * mse(guess, truth)


def ggl_psnr(guess: Tensor, truth: Tensor) -> Tensor:
    """The PSNR of GGL and LRP: images in [-1, 1], peak 1. For comparing with published tables only.

    Wrong with it: the data range is 2, so it lies 20 log10(2) = 6.02 dB below the PSNR.
    """
    guess, truth = image_pair(guess, truth)
    return psnr_of((2 * guess - 2 * truth).square().flatten(1).mean(1))


def ig_psnr_normalised(guess: Tensor, truth: Tensor, *, std: Sequence[float] | None = None) -> Tensor:
    """The PSNR of Inverting Gradients' `reconstruct_image`, and of Plato. For comparing with published tables only.

    The MSE is that of images divided by each channel's `std` (default: ImageNet's for three channels, EMNIST's for
    one), unclamped; the peak is 1 / std, and the channels' results are averaged.

    Wrong with it: it weights the channels by 1 / std^2, and it counts errors outside [0, 1]. With one channel and a
    guess inside [0, 1] it is the PSNR.
    """
    guess, truth = image_pair(guess, truth, clamp=False)
    scale = _scale(guess, std)
    normalised = ((guess - truth) / scale).square().flatten(1).mean(1)
    # The channels share one MSE, so the mean of their PSNRs is the PSNR for the geometric mean of their peaks.
    return psnr_of(normalised, peak=float(1 / scale.log().mean().exp()))


def plato_min_mse(guess: Tensor, truth: Tensor, *, std: Sequence[float] | None = None) -> Tensor:
    """For each guess the least MSE to any truth, on normalised images, as Plato has it: (G,). For comparing with
    published tables only.

    `std`: as in `ig_psnr_normalised`; Plato uses ImageNet's for CIFAR too.

    Wrong with it: unclamped, so values far above 1 occur (2.1e10 in OUTPOST's Table III); not one to one, so G copies
    of one good guess score as G good guesses; in units of 1 / std^2.
    """
    guess, truth = as_images(guess, clamp=False), as_images(truth, clamp=False)
    scale = _scale(truth, std)
    gaps = [((one - truth) / scale).square().flatten(1).mean(1).min() for one in guess]
    return torch.stack(gaps)


def plato_psnr_2022(guess: Tensor, truth: Tensor, *, std: Sequence[float] | None = None) -> Tensor:
    """-10 log10 of `plato_min_mse`, Plato's PSNR in 2022: (G,). For comparing with published tables only.

    Wrong with it: what is wrong with `plato_min_mse`, and a peak of 1 for images whose range is 1 / std.
    """
    return psnr_of(plato_min_mse(guess, truth, std=std))


def _scale(images: Tensor, std: Sequence[float] | None) -> Tensor:
    channels = images.shape[1]
    chosen = _STD_BY_CHANNELS.get(channels) if std is None else tuple(std)
    if chosen is None or len(chosen) != channels or min(chosen) <= 0:
        raise UsageError(f"expected a positive std for each of {channels} channels, got {chosen}; give std")
    return torch.tensor(chosen, dtype=torch.float64).view(1, -1, 1, 1)
