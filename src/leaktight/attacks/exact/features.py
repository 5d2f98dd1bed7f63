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
    """Images (N, C, H, W) in [0, 1] with given values inside a network, `constants["wanted"]`.

    pieces: from the images to these values; for a ReLU to what it reads. gated: which values are those behind a ReLU.
    smooth: weight of total variation. first: the images to start from.
    """

    pieces: Pieces
    gated: Sequence[bool]
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
            (torch.where(goal > 0, value - goal, value.clamp_min(0)) if behind else value - goal).square().sum()
            / goal.square().sum().clamp_min(1e-300)
            for value, goal, behind in zip(self.pieces(images), wanted, self.gated, strict=True)
        ]
        return torch.stack(parts).sum()

    @property
    def boxed(self) -> int:
        return self.first.numel()


def search(
    pieces: Pieces,
    gated: Sequence[bool],
    wanted: Sequence[Tensor],
    first: Tensor,
    stages: Sequence[tuple[float, int]],
) -> Tensor:
    """The images after stages of (weight of total variation, iterations)."""
    image = first
    for smooth, iterations in stages:
        problem = FeatureProblem(
            settings=SearchSettings(iterations=iterations, backend="eager", onednn=False),
            rngs=(Rng(0),),
            precision=first.dtype,
            constants={"wanted": list(wanted)},
            pieces=pieces,
            gated=gated,
            smooth=smooth,
            first=image,
        )
        found = Lbfgs(history=40).minimize(problem)
        image = found.best.variables["images"].detach()
    return image
