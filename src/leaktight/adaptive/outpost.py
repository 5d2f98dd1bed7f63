"""Against OUTPOST: columns with an exact zero have no noise, so their other entries are exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leaktight.adaptive.knowing import Adaptation, Case, weighing, zeros_are_the_defenses
from leaktight.adaptive.noise import of_steps, usual_contrast
from leaktight.adaptive.stages import continued
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.view import View
from leaktight.core.errors import require_above
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.tensors import rms
from leaktight.core.types import Observation, Reconstruction
from leaktight.defenses.outpost import Outpost

_CERTAIN = 4.0  # standard deviations that noise alone does not exceed
_ZEROS_OF_CHANGES = 2  # of a clean column: noise that is lost in the rounding of a parameter leaves single zeros
_SEVERAL = 0.01  # the relative error of clean entries after several steps, in some of which they may have been pruned
_PHOTOGRAPHS = 0.1  # the contrast of colour images
_PRIOR = 10.0  # times the weight of the prior that the contrast gives
_FIRST = 1000.0  # times that weight in the first stage


@dataclass(frozen=True, kw_only=True)
class KnowsOutpost(Adaptation):
    """OUTPOST: clean entries count by their own size, noisy ones by the variance that the public weights tell.

    floor: the assumed error of clean entries relative to their size, > 0; after several steps 0.01 at least.
    contrast: the expected difference of neighbouring pixels, > 0; None: that of the public data if disclosed, else 0.1
    for colour images and 0.3 for others.

    Noise is added to whole columns and is never exactly zero: a column with an exact zero has no noise, whether the
    zero is the defense's or ReLU's, and its entries that were not pruned are exact. In a model change it takes two
    zeros, as noise can be lost in rounding. Tensors with small gradients count
    by the root of their size. In noisy columns an entry above four standard deviations was not pruned. Fewer entries
    than pixels are left of a large image, so total variation, of colours and of their differences, fills the rest: it
    is strong in a first stage and weak in a second.
    An update without the zeros that pruning leaves in most layers was not perturbed and is matched as it is.
    Assumes: nothing. The size of the noise, noise_scale * min(Var[w], 1), is computed from the weights that were sent.
    Cannot: distinguish noisy from exact entries one by one (fisher = "element"), nor find clean columns without pruning
    (prune_share = 0): all entries then count by their variance. After several local steps a zero shows only that no
    step changed the entry, so fewer clean columns are found, and none if a step was not perturbed.
    """

    exact: ClassVar[bool] = True
    blurs: ClassVar[bool] = True

    floor: float = 1e-5
    contrast: float | None = None

    def __post_init__(self) -> None:
        require_above(0, floor=self.floor, contrast=self.contrast)

    def unable(self, case: Case) -> str | None:
        assert isinstance(self.defense, Outpost)
        if self.defense.fisher == "element" or not self.defense.prune_share:
            return "no entry is known to be exact"
        return "steps that were pruned differently hide what is exact" if case.num_steps > 1 else None

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        attack, first = zeros_are_the_defenses(attack), seen[0]
        if not self._perturbed(first) or len(first.inputs.shape) != 3:
            return attack, list(seen)
        square = sum(float((first.update.tensors[name] / e).square().sum()) for name, e in self.errors(first).items())
        contrast = self.contrast or self._usual_contrast(first)
        smooth = attack.optimizer.smooth
        weight = (
            _PRIOR * first.inputs.size * (first.batch_size or 1) / square / (8 * contrast**2 if smooth else contrast)
        )
        variation = TotalVariation(form="double_opponent", q=1.0 if smooth else 0.5)
        rest = tuple((own, prior) for own, prior in attack.priors if not isinstance(prior, TotalVariation))
        return replace(attack, priors=((weight, variation), *rest)), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        if not self._perturbed(seen):
            return view
        errors = self.errors(seen)
        least = min(float(error.min()) for error in errors.values())
        weights = {name: least / error for name, error in errors.items()}
        return weighing(view, weights, "columns with exact zeros are taken for clean")

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        if not self._perturbed(seen[0]) or not attack.priors:
            return super().solve(attack, seen, rng=rng, progress=progress)
        (weight, variation), *rest = attack.priors
        first = replace(attack, priors=((_FIRST * weight, variation), *rest))
        begun = first.reconstruct(seen, rng=rng.child("first"), progress=progress)
        second = replace(continued(attack, begun.guess), iterations=attack.iterations)
        found = second.reconstruct(seen, rng=rng, progress=progress)
        return replace(found, first_loss=begun.first_loss)

    def errors(self, seen: Observation) -> dict[str, Tensor]:
        """The standard deviation of every entry's error, by name; infinite for entries that were pruned."""
        tensors = {name: tensor.detach().double() for name, tensor in seen.update.tensors.items()}
        zeros = 1 if seen.update.kind == "gradient" else _ZEROS_OF_CHANGES
        clean = {name: self._clean(tensor, zeros) for name, tensor in tensors.items()}
        exact = {name: tensor[clean[name] & (tensor != 0)] for name, tensor in tensors.items()}
        sizes = {name: rms(exact[name] if len(exact[name]) else tensor) for name, tensor in tensors.items()}
        floor = self.floor if seen.num_steps == 1 else max(self.floor, _SEVERAL)
        result = {}
        for name, tensor in tensors.items():
            std = self._noise_std(seen, name)
            small = floor * math.sqrt(max(sizes.values()) * sizes[name])
            bound = float(exact[name].abs().min()) if len(exact[name]) else std
            faint = tensor.abs() <= _CERTAIN * std
            # Pruned for sure if no entry that was kept can look like this; else the noise hides whether it was.
            hidden = math.inf if bound > (_CERTAIN + 1) * std else math.hypot(std, bound)
            noisy = torch.where(faint, max(hidden, small), math.hypot(std, small))
            error = torch.where(clean[name], torch.where(tensor != 0, small, math.inf), noisy)
            result[name] = error.to(seen.update.tensors[name])
        return result

    def _perturbed(self, seen: Observation) -> bool:
        """Whether most weights have at least a quarter of the exact zeros that the settings predict.

        ReLU leaves zeros in few of them, and kernels on padding in the last ones only.
        """
        assert isinstance(self.defense, Outpost)
        least = 0.25 * self.defense.prune_share * (1 - self.defense.noise_share)
        shares = [float((tensor == 0).double().mean()) for tensor in seen.update.tensors.values() if tensor.ndim > 1]
        return not shares or float(torch.tensor(shares).median()) >= least

    def _clean(self, tensor: Tensor, zeros: int = 1) -> Tensor:
        """A mask of the entries without noise: those of columns with as many exact zeros."""
        assert isinstance(self.defense, Outpost)
        if self.defense.fisher == "element" or not tensor.ndim:
            return tensor == 0
        return ((tensor == 0).sum(0, keepdim=True) >= min(zeros, len(tensor))).expand_as(tensor)

    def _noise_std(self, seen: Observation, name: str) -> float:
        """The standard deviation of the noise in the update, infinite if unknown."""
        assert isinstance(self.defense, Outpost)
        weights = seen.broadcast.params[name]
        variance = float(weights.double().var()) if weights.numel() > 1 else 0.0
        std = of_steps(self.defense.noise_scale * min(variance, 1.0), seen)
        return math.inf if std is None else std

    def _usual_contrast(self, seen: Observation) -> float:
        colours = seen.public_data is None and seen.inputs.shape[0] == 3
        return _PHOTOGRAPHS if colours else usual_contrast(seen)
