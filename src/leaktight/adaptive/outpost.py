"""Against OUTPOST: columns with an exact zero have no noise, so their other entries are exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leaktight.adaptive.knowing import Adaptation, weighing, zeros_are_the_defenses
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.errors import require_above
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Params
from leaktight.defenses.outpost import Outpost


def _moved(view: View, seen: Observation) -> dict[str, Tensor]:
    """Which entries of an update are not zero for a random image; kernel entries on padding are always zero."""
    names = seen.update.tensors
    if not seen.task.one_class:
        return {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in names.items()}
    count, like = seen.batch_size or 1, next(iter(view.params.values()))
    images = torch.rand(count, *seen.inputs.shape, generator=Rng(0).public()).to(like)
    labels = torch.arange(count) % seen.num_classes
    with torch.no_grad():
        guess = view.guess(images, labels, view.params, view.buffers, view.starts)
    return {name: guess[name] != 0 for name in names}


@dataclass(frozen=True, kw_only=True)
class KnowsOutpost(Adaptation):
    """OUTPOST: clean entries count fully, noisy ones by the variance that the public weights tell, zeros not at all.

    floor: the assumed error of clean entries relative to their size, > 0; entries with noise of standard deviation s
    have the weight f / sqrt(f^2 + s^2), with f that error. The smaller, the less weight noisy entries have.

    Noise is added to whole columns and is never exactly zero: a column with an exact zero has no noise, and its entries
    that were not pruned are exact. An update with few zeros beyond those that any image leaves (a random one is tried)
    was not perturbed and is matched as it is.
    Assumes: nothing. The size of the noise, noise_scale * min(Var[w], 1), is computed from the weights that were sent.
    Cannot: distinguish noisy from exact entries one by one (fisher = "element"), nor find clean columns without pruning
    (prune_share = 0): all entries then have weights by their variance. After several local steps a zero shows only that
    no step changed the entry, so fewer clean columns are found, and exact steps cannot be told from pruned ones.
    """

    exact: ClassVar[bool] = True
    blurs: ClassVar[bool] = True

    floor: float = 0.01

    def __post_init__(self) -> None:
        require_above(0, floor=self.floor)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        return zeros_are_the_defenses(attack), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        tensors = seen.update.tensors
        if not self._perturbed(tensors, _moved(view, seen)):
            return view
        masks = {name: self._clean(tensor) for name, tensor in tensors.items()}
        sizes = [tensor[masks[name] & (tensor != 0)] for name, tensor in tensors.items()]
        typical = float(torch.cat(sizes).square().mean().sqrt()) if any(len(each) for each in sizes) else 1.0
        weights = {}
        for name, tensor in tensors.items():
            std = self._noise_std(seen, name) / (self.floor * typical)
            noisy = torch.full_like(tensor, 1 / math.sqrt(1 + std**2))
            weights[name] = torch.where(masks[name], (tensor != 0).to(tensor.dtype), noisy)
        return weighing(view, weights, "columns with exact zeros are taken for clean")

    def _perturbed(self, tensors: Params, moved: Params) -> bool:
        """Whether there are at least a quarter of the exact zeros that the settings predict.

        moved: masks of the entries that are not zero for any image.
        """
        assert isinstance(self.defense, Outpost)
        least = 0.25 * self.defense.prune_share * (1 - self.defense.noise_share)
        total = sum(int(mask.sum()) for mask in moved.values())
        return sum(int(((tensor == 0) & moved[name]).sum()) for name, tensor in tensors.items()) >= least * total

    def _clean(self, tensor: Tensor) -> Tensor:
        """A mask of the entries without noise: those of columns with an exact zero."""
        assert isinstance(self.defense, Outpost)
        if self.defense.fisher == "element" or not tensor.ndim:
            return tensor == 0
        return (tensor == 0).any(0, keepdim=True).expand_as(tensor)

    def _noise_std(self, seen: Observation, name: str) -> float:
        """The standard deviation of one step's noise in the update; infinite if unknown."""
        assert isinstance(self.defense, Outpost)
        weights = seen.broadcast.params[name]
        variance = float(weights.double().var()) if weights.numel() > 1 else 0.0
        std = self.defense.noise_scale * min(variance, 1.0)
        if seen.update.kind == "gradient":
            return std
        return math.inf if seen.local_training is None else std * seen.local_training.learning_rate
