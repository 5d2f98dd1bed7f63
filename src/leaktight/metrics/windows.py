"""SSIM of many pairs: the windows of each image are summed up once, by products of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.inputs import Images
from leaktight.core.text import sides

_SIGMA_PER_RADIUS = 0.3
_FULL_RADIUS = 5
_C1, _C2 = 0.01**2, 0.03**2


@dataclass(frozen=True)
class Windows:
    """Images (N, C, H, W), and mean and variance of their pixels in every window inside the image."""

    images: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, images: Tensor, precision: torch.dtype = torch.float32) -> Windows:
        images = Images.checked(images).detach().to("cpu", precision).clamp(0, 1)
        mean = _blurred(images)
        return cls(images, mean, (_blurred(images.square()) - mean.square()).clamp_min(0))

    def take(self, places: Tensor) -> Windows:
        return Windows(self.images[places], self.mean[places], self.variance[places])

    def ssim(self, other: Windows) -> Tensor:
        """`image.ssim` of these images and as many others, (N,); in float32 to about four digits."""
        means = self.mean * other.mean
        shared = _blurred(self.images * other.images) - means
        above = (2 * means + _C1) * (2 * shared + _C2)
        below = (self.mean.square() + other.mean.square() + _C1) * (self.variance + other.variance + _C2)
        return (above / below).flatten(1).mean(1)


def _blurred(images: Tensor) -> Tensor:
    """The weighted mean of each window inside the image; rows and columns are exchanged."""
    height, width = images.shape[-2:]
    radius = min(_FULL_RADIUS, (min(height, width) - 1) // 2)
    if not radius:
        raise UsageError(f"expected images of at least 3 x 3 pixels for SSIM, got {sides((height, width))}")
    across, down = (torch.from_numpy(_band(size, radius)).to(images) for size in (width, height))
    return (images @ across.T).transpose(-1, -2).contiguous() @ down.T


@lru_cache(maxsize=32)
def _band(size: int, radius: int) -> np.ndarray:
    """A matrix whose rows are the window's weights, each row one place further: (size - 2 radius, size)."""
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * np.square(offsets / (_SIGMA_PER_RADIUS * radius)))
    band = np.zeros((size - 2 * radius, size))
    for place, row in enumerate(band):
        row[place : place + 2 * radius + 1] = weights / weights.sum()
    return band
