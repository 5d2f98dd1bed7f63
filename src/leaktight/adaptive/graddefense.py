"""Against GradDefense: some slices of the update are exact; a first guess shows which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leaktight.adaptive.knowing import Adaptation, weighing
from leaktight.adaptive.stages import Judging, often_in_stages
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.errors import require_at_least
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.tensors import unflattened
from leaktight.core.types import Observation, Params, Reconstruction


@dataclass(frozen=True, kw_only=True)
class KnowsGradDefense(Adaptation):
    """GradDefense: reconstruct, give entries of the update that fit the guess more weight, and repeat.

    stages: how often weights are computed, >= 1. window: number of neighbouring entries judged together, >= 1.
    quantile: the fraction of windows taken as exact, in (0, 1). starts: how often the search begins again while its
    loss is above what rounding explains, >= 1.

    An entry counts q / (q + d) in a squared distance, with d the mean squared difference from the guess in the window
    around it and q the `quantile` of all d. Exact slices fit better with every stage and noisy ones do not, so that in
    the end only exact slices are matched.
    Assumes: this fraction of entries is exact. The borders of slices need not be known.
    Cannot: work if noise outweighs the gradient in most slices, as the first guess is then useless.
    """

    exact: ClassVar[bool] = True
    blurs: ClassVar[bool] = True

    stages: int = 3
    window: int = 32
    quantile: float = 0.25
    starts: int = 3

    def __post_init__(self) -> None:
        require_at_least(1, stages=self.stages, window=self.window, starts=self.starts)
        if not 0 < self.quantile < 1:
            raise ValueError(f"expected quantile in (0, 1), got {self.quantile}")

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        fits = WhatFits(self.window, self.quantile)
        return often_in_stages(attack, fits, self.stages, seen, starts=self.starts, rng=rng, progress=progress)


@dataclass(frozen=True)
class WhatFits(Judging):
    """Weighs entries by how well the guess fits those around them."""

    window: int
    quantile: float

    def judged(self, view: View, guessed: Params | None) -> View:
        if guessed is None:
            return view
        differences = {name: guessed[name] - tensor for name, tensor in view.target.items()}
        weights = fitness(differences, self.window, self.quantile)
        return weighing(view, weights, "entries weighed by how well an earlier guess explains them")


def fitness(differences: Params, window: int, quantile: float) -> dict[str, Tensor]:
    """sqrt(q / (q + d)) of every entry: d is the mean squared difference in the window around it, q a quantile of d."""
    flat = torch.cat([tensor.flatten() for tensor in differences.values()]).to(torch.float64)
    width = min(window, len(flat))
    padded = torch.nn.functional.pad(flat.square()[None], (width // 2, width - 1 - width // 2), mode="replicate")
    around = torch.nn.functional.avg_pool1d(padded, width, 1)[0]
    level = around.kthvalue(max(1, int(quantile * len(around)))).values + torch.finfo(torch.float64).tiny
    return unflattened((level / (level + around)).sqrt(), differences)
