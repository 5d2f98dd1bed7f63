"""Against OUTPOST: exact zeros show where there is no noise, and what stands beside them is exact."""

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
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Params
from leaktight.defenses.outpost import Outpost


def _moved(view: View, seen: Observation) -> dict[str, Tensor]:
    """Which entries of an update a random image moves; kernels that see nothing but padding are always zero."""
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

    floor: how exact clean entries are taken to be, as a share of their size; noise of standard deviation s weighs
    f / sqrt(f^2 + s^2) with f that share. The smaller, the less noisy entries count.

    Noise falls on whole columns, and noise is never exactly zero: a column with an exact zero in it has none, and the
    entries of it that pruning left are exact. An update with hardly a zero, but for those that any image leaves (a
    random one is tried), was not perturbed, and is matched as it is.
    Assumes: nothing. The size of the noise, noise_scale * min(Var[w], 1), is computed from the weights that were sent.
    Cannot: tell noisy entries from exact ones element by element (fisher = "element"), nor read a mask without pruning
    (prune_share = 0): then all entries count by their variance. After several local steps a zero shows only that none
    of them touched the entry, so fewer clean columns are found, and exact steps cannot be told from pruned ones.
    """

    exact: ClassVar[bool] = True
    blurs: ClassVar[bool] = True

    floor: float = 0.01

    def __post_init__(self) -> None:
        if not self.floor > 0:
            raise ValueError(f"expected floor > 0, got {self.floor}")

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
        """Whether there are as many exact zeros as the settings lead one to expect: a quarter of them, at least.

        moved: which entries an image moves at all.
        """
        assert isinstance(self.defense, Outpost)
        least = 0.25 * self.defense.prune_share * (1 - self.defense.noise_share)
        total = sum(int(mask.sum()) for mask in moved.values())
        return sum(int(((tensor == 0) & moved[name]).sum()) for name, tensor in tensors.items()) >= least * total

    def _clean(self, tensor: Tensor) -> Tensor:
        """Which entries have no noise: those of columns with an exact zero."""
        assert isinstance(self.defense, Outpost)
        if self.defense.fisher == "element" or not tensor.ndim:
            return tensor == 0
        return (tensor == 0).any(0, keepdim=True).expand_as(tensor)

    def _noise_std(self, seen: Observation, name: str) -> float:
        """The standard deviation of one step's noise in the update; infinite where its scale is not known."""
        assert isinstance(self.defense, Outpost)
        weights = seen.broadcast.params[name]
        variance = float(weights.double().var()) if weights.numel() > 1 else 0.0
        std = self.defense.noise_scale * min(variance, 1.0)
        if seen.update.kind == "gradient":
            return std
        return math.inf if seen.local_training is None else std * seen.local_training.learning_rate
