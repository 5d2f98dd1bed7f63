"""The untrained generator of GRNN, from a 4x4 map to images."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from leaktight.core.errors import ModelError
from leaktight.core.inputs import Images

SMALLEST, LARGEST = 32, 256
"""Resolutions at which images are generated: powers of two between these."""

_LAST_WIDTH = 32


class GrnnGenerator(nn.Module):
    """From noise (N, latent) to images (N, C, H, W) in [0, 1].

    The noise becomes a 4x4 map (transposed convolution, GLU). Every block doubles it (nearest neighbour, convolution of
    3x3 without bias, batch norm, GLU) and halves the channels, to 32 before the last. It has no state: batch norm uses
    the statistics of the batch. Images whose size is not a power of two are cropped from the next larger square.
    Reference: Ren et al., GRNN: Generative Regression Neural Network, ACM TIST 2022, section 3.2 and published code.
    """

    def __init__(self, latent: int, inputs: Images) -> None:
        super().__init__()
        self.size = inputs.height, inputs.width
        doublings = resolution(inputs).bit_length() - 3  # from 4x4
        widths = [_LAST_WIDTH << step for step in reversed(range(doublings))]
        self.first = nn.Sequential(nn.ConvTranspose2d(latent, 2 * widths[0], 4), nn.GLU(1))
        self.blocks = nn.Sequential(
            *(_doubling(before, 2 * after) for before, after in pairwise((*widths, inputs.channels)))
        )

    def forward(self, noise: Tensor) -> Tensor:
        drawn: Tensor = self.blocks(self.first(noise[:, :, None, None])).sigmoid()
        (height, width), (rows, columns) = self.size, drawn.shape[2:]
        top, left = (rows - height) // 2, (columns - width) // 2
        return drawn[:, :, top : top + height, left : left + width]


def resolution(inputs: Images) -> int:
    """The power of two at which images of this size are generated."""
    longest = max(inputs.height, inputs.width)
    if longest > LARGEST:
        raise ModelError(f"expected images of at most {LARGEST}x{LARGEST} pixels for GRNN, got {longest}; resize them")
    return max(SMALLEST, 1 << (longest - 1).bit_length())


def _doubling(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after, track_running_stats=False),
        nn.GLU(1),
    )
