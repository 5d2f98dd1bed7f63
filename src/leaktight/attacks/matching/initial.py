"""Where a search for images starts. Images are in [0, 1]; normalisation happens inside the network.

Drawn on the CPU, in float32, from the generator given, so that the same seed gives the same start everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor

from leaktight.models.source import require_choice

Shape: TypeAlias = tuple[int, ...]
"""(N, C, H, W)."""

Distribution: TypeAlias = Literal["normal", "standard_normal", "uniform"]


def _normal(shape: Shape, generator: Generator) -> Tensor:
    return 0.5 + 0.25 * torch.randn(shape, generator=generator)


def _standard_normal(shape: Shape, generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _uniform(shape: Shape, generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator)


DISTRIBUTIONS: Mapping[str, Callable[[Shape, Generator], Tensor]] = {
    "normal": _normal,
    "standard_normal": _standard_normal,
    "uniform": _uniform,
}
"""normal: N(0.5, 0.25^2), which is N(0, 1) after a normalisation with mean 0.5 and standard deviation 0.25, about that
of CIFAR and ImageNet; so Inverting Gradients draws. 5 % of it lies outside [0, 1] and is left there: clamping would put
those pixels on the border from the start, and an attack with a box clips after its first step anyway.
standard_normal: N(0, 1) in pixel values, as DLG, whose networks do not normalise. uniform: U(0, 1)."""


@dataclass(frozen=True, kw_only=True)
class Start(ABC):
    """A way to choose the first images."""

    @abstractmethod
    def draw(self, shape: Shape, generator: Generator) -> Tensor:
        """Images of `shape` (N, C, H, W)."""


@dataclass(frozen=True, kw_only=True)
class Noise(Start):
    """Every pixel by itself."""

    distribution: Distribution = "normal"

    def __post_init__(self) -> None:
        require_choice("distribution", self.distribution, DISTRIBUTIONS)

    def draw(self, shape: Shape, generator: Generator) -> Tensor:
        return DISTRIBUTIONS[self.distribution](shape, generator)


@dataclass(frozen=True, kw_only=True)
class Patterned(Start):
    """A small square of noise per image, tiled from the top left corner and cut off at the edges.

    patch: the side of the square; CPL has 16 with "uniform" (2x2 tiles for 32x32), Fishing 4 with "normal".
    Reference: Wei et al., A Framework for Evaluating Client Privacy Leakages in Federated Learning, ESORICS 2020.
    """

    patch: int = 16
    distribution: Distribution = "uniform"

    def __post_init__(self) -> None:
        require_choice("distribution", self.distribution, DISTRIBUTIONS)
        if self.patch < 1:
            raise ValueError(f"expected patch >= 1, got {self.patch}")

    def draw(self, shape: Shape, generator: Generator) -> Tensor:
        count, channels, height, width = shape
        square = DISTRIBUTIONS[self.distribution]((count, channels, self.patch, self.patch), generator)
        tiles = (-(-height // self.patch), -(-width // self.patch))
        return square.tile(tiles)[..., :height, :width].contiguous()


@dataclass(frozen=True, kw_only=True)
class Grey(Start):
    """The same grey everywhere; nothing is drawn, so all restarts are one.

    Images with the same label then stay equal for ever: their gradients are.
    """

    level: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.level <= 1:
            raise ValueError(f"expected level in [0, 1], got {self.level}")

    def draw(self, shape: Shape, generator: Generator) -> Tensor:
        return torch.full(shape, self.level)
