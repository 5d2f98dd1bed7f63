"""Points in the plane: two sets of the same two classes at different positions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from leaktight.core.rng import Rng
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.settings import SplitSettings, check_minimum

REACH = 8.0
"""Coordinates from -REACH to REACH are stored as bytes from 0 to 255."""

_SETS = (("lower", ((-2.0, -1.0), (1.0, -2.0)), 0.8), ("upper", ((-1.0, 2.5), (2.0, 2.0)), 1.2))
"""Of each set: its name, the centres of class 0 and class 1, and the standard deviation of both."""


@dataclass(frozen=True, kw_only=True)
class TwoGaussians(SplitSettings):
    """Two sets of points in the plane, each of two Gaussian classes with its own centres and standard deviation.

    examples: points per set, half of each class. draw_seed: selects the points. test_share: of each class of each set.
    opposed: swaps the classes of the upper set, so that a classifier for one set is wrong for the other.
    An example is an image of 2 pixels, its coordinates from -8 to 8; partition by_source gives each set to a client.

    Reference: Ren, thesis 2023, section 4.3.1 and Fig. 4.2.
    Differs from the paper: it states neither centres nor deviations, so these are our own; coordinates have 256 levels.
    """

    test_share: float = 0.1
    examples: int = 40_000
    draw_seed: int = 0
    opposed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, 4, "examples")

    def load(self, root: Path) -> Dataset:
        points, targets, groups = [], [], []
        for index, (name, centres, std) in enumerate(_SETS):
            ordered = centres[::-1] if self.opposed and index else centres
            for label, centre in enumerate(ordered):
                count = self.examples // 2
                generator = Rng(self.draw_seed).child("gaussians", name, label).public()
                points.append(torch.tensor(centre) + std * torch.randn(count, 2, generator=generator))
                targets.append(torch.full((count,), label))
                groups.append(torch.full((count,), index))
        examples = Examples(_to_bytes(torch.cat(points)), torch.cat(targets))
        source = torch.cat(groups)
        train, test = self.cut(2 * source + examples.targets)
        names = tuple(name for name, *_ in _SETS)
        return Dataset(
            "two_gaussians",
            examples.take(train),
            examples.take(test),
            ("0", "1"),
            groups=source[train],
            group_names=names,
        )


def coordinates(images: Tensor) -> Tensor:
    """The points (N, 2) behind images (N, 1, 1, 2) of bytes."""
    return images.flatten(1).to(torch.float32) * (2 * REACH / 255) - REACH


def _to_bytes(points: Tensor) -> Tensor:
    levels = ((points + REACH) * (255 / (2 * REACH))).round().clamp(0, 255)
    return levels.to(torch.uint8)[:, None, None, :]
