"""MSE, PSNR and SSIM of images.

Every function takes two tensors (N, C, H, W) of floats, clamps them to [0, 1], uses a data range of 1, and returns
scores (N,), computed on the CPU in float64 without gradient. A guess with a NaN has score NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.inputs import Images
from leaktight.core.text import sides
from leaktight.metrics.windows import Windows

MIN_MSE = 1e-10
"""The smallest MSE in a PSNR: identical images have 100 dB, means are finite. Rounding to bytes gives about 59 dB."""


def image_pair(guess: Tensor, truth: Tensor, *, clamp: bool = True) -> tuple[Tensor, Tensor]:
    """Both as detached float64 on the CPU, one guess for each truth."""
    if guess.shape != truth.shape:
        raise UsageError(
            f"expected one guess of the same shape for each truth, got {sides(guess.shape)} and {sides(truth.shape)}; "
            "match them first"
        )
    return as_images(guess, clamp=clamp), as_images(truth, clamp=clamp)


def as_images(images: Tensor, *, clamp: bool = True) -> Tensor:
    """Images as detached float64 on the CPU."""
    images = Images.checked(images).detach().cpu().double()
    return images.clamp(0, 1) if clamp else images


def mse(guess: Tensor, truth: Tensor) -> Tensor:
    """The mean squared error over all channels and pixels, in [0, 1].

    >>> import torch
    >>> mse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5)).tolist()
    [0.25]
    """
    guess, truth = image_pair(guess, truth)
    return (guess - truth).square().flatten(1).mean(1)


def psnr(guess: Tensor, truth: Tensor) -> Tensor:
    """The peak signal-to-noise ratio in dB for a peak of 1, computed from max(MSE, 1e-10): in [0, 100] dB.

    >>> import torch
    >>> psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1, dtype=torch.float64)).tolist()
    [20.0]
    """
    return psnr_of(mse(guess, truth))


def psnr_of(mean_squared_error: Tensor, *, peak: float = 1.0) -> Tensor:
    """10 log10(peak^2 / MSE), with an MSE of at least `MIN_MSE` peak^2."""
    return -10 * (mean_squared_error / peak**2).clamp_min(MIN_MSE).log10()


def ssim(guess: Tensor, truth: Tensor) -> Tensor:
    """Structural similarity in [-1, 1]: Gaussian window of 11 x 11 with sigma 1.5, K1 = 0.01, K2 = 0.03, data range 1.

    The mean over all channels and all windows inside the image, as in the paper and scikit-image; torchmetrics 1.9
    includes windows over a mirrored border, and sums up each window by itself, which takes up to forty times as
    long. A smaller image gets the largest odd window that fits its shorter side, with sigma in proportion.

    Reference: Wang, Bovik, Sheikh, Simoncelli, Image Quality Assessment: From Error Visibility to Structural
    Similarity, IEEE Transactions on Image Processing, 2004.
    """
    both = image_pair(guess, truth)
    first, second = (Windows.of(images, torch.float64) for images in both)
    return first.ssim(second)
