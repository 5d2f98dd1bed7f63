"""Generators whose latents can be told from their images, for tests; named as "tests.attacks.generators:function"."""

from __future__ import annotations

import torch
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.models.gan import OwnGenerator

SIDE = 4


class Linear(nn.Module):
    """Images 0.5 + A z of 4x4 pixels; with classes, each has an offset of its own."""

    def __init__(self, latent: int, num_classes: int | None) -> None:
        super().__init__()
        draws = replayed(0).child("linear").public()
        self.matrix = nn.Parameter(0.05 * torch.randn(SIDE * SIDE, latent, generator=draws))
        self.offset = nn.Parameter(0.2 * torch.rand(num_classes or 1, SIDE * SIDE, generator=draws))

    def forward(self, latents: Tensor, classes: Tensor | None = None) -> Tensor:
        offset = self.offset[0] if classes is None else self.offset[classes]
        return (0.4 + offset + latents @ self.matrix.T).reshape(-1, 1, SIDE, SIDE)


def linear(latent: int, num_classes: int | None) -> nn.Module:
    return Linear(latent, num_classes)


def eight(latent: int) -> nn.Module:
    """Images of 8x8 pixels."""
    return nn.Sequential(nn.Linear(latent, 64), nn.Unflatten(1, (1, 8, 8)))


def flat(latent: int) -> nn.Module:
    return nn.Linear(latent, 3)


LINEAR = OwnGenerator(target="tests.attacks.generators:linear", latent=3, output="unit")
CONDITIONAL = OwnGenerator(target="tests.attacks.generators:linear", latent=3, output="unit", num_classes=3)
EIGHT = OwnGenerator(target="tests.attacks.generators:eight", latent=3, output="unit")
