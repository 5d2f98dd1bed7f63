"""Images that have given values inside a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.attacks.optimizers.optimizer import Problem, SearchSettings, Tree
from leaktight.core.rng import Rng

Pieces = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class FeatureProblem(Problem):
    """An image (1, C, H, W) in [0, 1] whose values before some ReLUs give `constants["wanted"]` behind them.

    pieces: from the image to what each ReLU reads. smooth: weight of total variation. first: the image to start from.
    """

    pieces: Pieces
    smooth: float
    first: Tensor

    def start(self, rng: Rng) -> Tree:
        return {"images": self.first}

    def loss(self, variables: Tree, group: Tree, constants: Tree, share: Tensor | None = None) -> Tensor:
        images = variables["images"]
        misfit = self.misfit(images, constants["wanted"])
        return misfit + self.smooth * TotalVariation().penalty(images) if self.smooth else misfit

    def misfit(self, images: Tensor, wanted: Sequence[Tensor]) -> Tensor:
        """The squared error of each node, relative to its size; of a closed ReLU only what it would let through."""
        parts = [
            torch.where(goal > 0, value - goal, value.clamp_min(0)).square().sum() / goal.square().sum()
            for value, goal in zip(self.pieces(images), wanted, strict=True)
        ]
        return torch.stack(parts).sum()

    @property
    def boxed(self) -> int:
        return self.first.numel()


def search(pieces: Pieces, wanted: Sequence[Tensor], first: Tensor, stages: Sequence[tuple[float, int]]) -> Tensor:
    """The image after stages of (weight of total variation, iterations)."""
    image = first
    for smooth, iterations in stages:
        problem = FeatureProblem(
            settings=SearchSettings(iterations=iterations, backend="eager"),
            rngs=(Rng(0),),
            precision=torch.float64,
            constants={"wanted": list(wanted)},
            pieces=pieces,
            smooth=smooth,
            first=image,
        )
        found = Lbfgs(history=40).minimize(problem)
        image = found.best.variables["images"].detach()
    return image
