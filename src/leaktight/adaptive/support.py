"""Against compression, min-max sampling and Soteria: entries that the defense made zero are not matched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from leaktight.adaptive.knowing import (
    Adaptation,
    Judging,
    in_stages,
    last_weight,
    until_explained,
    weighing,
    without,
    zeros_are_the_defenses,
)
from leaktight.adaptive.pruning import PrunedAlike, pruned_steps
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.errors import require_at_least
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Params, Reconstruction
from leaktight.defenses.minmax import MinMaxSampling
from leaktight.models.source import require_choice

_LAPLACE = torch.linspace(0.5e-2, 30 - 0.5e-2, 3000, dtype=torch.float64)  # where the density is integrated


@dataclass(frozen=True, kw_only=True)
class KnowsSupport(Adaptation):
    """Gradient compression: entries that are zero in the update are left out of the distance.

    starts: how often the search begins again while its loss is above what rounding explains, >= 1.
    stages: with several pruned steps, how often the entries that each step pruned are computed again from the guess.

    After one step the remaining entries are exact. After several, an entry is the sum over the steps that kept it: the
    steps of a guess are pruned alike, at first where the update is zero, then where the steps of the last guess are.
    Assumes: nothing for one step; the client's local training for several.
    Cannot: know the size of a pruned entry, only that it was not among the largest.
    """

    exact: ClassVar[bool] = True

    starts: int = 6
    stages: int = 6

    def __post_init__(self) -> None:
        require_at_least(1, starts=self.starts)
        require_at_least(0, stages=self.stages)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        attack = zeros_are_the_defenses(attack)
        if any(pruned_steps(self.defense, each) for each in seen):  # the first stage cannot explain the update
            return attack, list(seen)
        return until_explained(attack, seen, self.starts), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        visible = {name: (tensor != 0).to(tensor.dtype) for name, tensor in seen.update.tensors.items()}
        return weighing(view, visible, "zeros of the update are not matched")

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        if not any(pruned_steps(self.defense, each) for each in seen):
            return super().solve(attack, seen, rng=rng, progress=progress)
        return in_stages(attack, PrunedAlike(self.defense), self.stages, seen, rng=rng, progress=progress)


@dataclass(frozen=True, kw_only=True)
class KnowsSampling(KnowsSupport):
    """Min-max sampling: the visible entries alone; the values of the unbiased form are solved for, with a guess's help.

    stages: how often the solutions are chosen again, >= 0.

    An entry g is sent as v = g + C / g. Its size is at least 2 sqrt(C), and close to that for some entry, which reveals
    C. Every entry then has two solutions. The first choice is the more likely one, given how many entries of its tensor
    were sampled; later choices are the solution nearer to the guess.
    Assumes: one local step, or sampling of the whole update (at = "update"); many entries are sent.
    Cannot: use entries that were not sampled. Values of several steps that were each sampled are not solved for.
    """

    stages: int = 6

    def __post_init__(self) -> None:
        require_at_least(0, stages=self.stages)

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        if not all(self._solvable(each) for each in seen):
            return super().solve(attack, seen, rng=rng, progress=progress)
        return in_stages(attack, WhichSolution(), self.stages, seen, rng=rng, progress=progress)

    def _solvable(self, seen: Observation) -> bool:
        """Whether the defense changed the values of the update itself, and not of several steps before their sum."""
        assert isinstance(self.defense, MinMaxSampling)
        local, count = seen.local_training, seen.batch_size
        one_step = seen.update.kind == "gradient" or (local and count and local.num_steps(count) == 1)
        changed = self.defense.unbiased and self.defense.keep_share < 1
        return changed and (self.defense.at == "update" or bool(one_step))


@dataclass(frozen=True)
class WhichSolution(Judging):
    """First the more likely solution of every entry, weighted by its certainty; then the one nearer to the guess."""

    def judged(self, view: View, guessed: Params | None) -> View:
        solved = solutions(view.target)
        if guessed is None:
            first = {name: torch.where(each.odds > 1, each.small, each.large) for name, each in solved.items()}
            sure = {name: ((each.odds - 1) / (each.odds + 1)).abs() for name, each in solved.items()}
            return weighing(_aimed(view, first), sure, "values of the unbiased estimate solved for")
        nearer = {}
        for name, each in solved.items():
            own = guessed[name].to(each.small)
            nearer[name] = torch.where((own - each.small).abs() < (own - each.large).abs(), each.small, each.large)
        return _aimed(view, nearer)


class Solutions(NamedTuple):
    """The two solutions g of v = g + C / g for every entry of a tensor, 0 if v is 0, and the odds of the smaller."""

    small: Tensor
    large: Tensor
    odds: Tensor


def solutions(tensors: Params) -> dict[str, Solutions]:
    """The possible values before an unbiased sample, in float64.

    With g = sqrt(C) t, the solutions are t and 1 / t. For entries with a Laplace distribution of mean size s their odds
    are e^((t - 1/t) sqrt(C) / s) / t^4; the second factor is how likely each is to be sampled and to give this v.
    """
    sizes = torch.cat([tensor.flatten() for tensor in tensors.values()]).abs().to(torch.float64)
    root = float(sizes[sizes > 0].min()) / 2
    solved = {}
    for name, tensor in tensors.items():
        value = tensor.to(torch.float64)
        ratio = ((value.abs() + (value.square() - 4 * root**2).clamp(min=0).sqrt()) / (2 * root)).clamp(min=1)
        drawn = int((value != 0).sum())
        size = mean_size((drawn + 0.5) / (value.numel() + 1))
        odds = ((ratio - 1 / ratio) / size).clamp(max=500).exp() / ratio**4
        solved[name] = Solutions(value.sign() * root / ratio, value.sign() * root * ratio, odds)
    return solved


def mean_size(share: float) -> float:
    """The mean size, in units of sqrt(C), of Laplace-distributed entries of which the fraction `share` is sampled.

    >>> round(mean_size(0.5), 3)  # the integral of exp(-x) m^2 x^2 / (m^2 x^2 + 1), solved for m
    1.544
    """
    low, high = 1e-4, 1e4
    density = (-_LAPLACE).exp()
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        square = (middle * _LAPLACE).square()
        expected = float((density * square / (square + 1)).sum() / density.sum())
        low, high = (middle, high) if expected < share else (low, middle)
    return math.sqrt(low * high)


def _aimed(view: View, values: Params) -> View:
    """A view with another target."""
    return replace(view, target={name: values[name].to(tensor) for name, tensor in view.target.items()})


@dataclass(frozen=True, kw_only=True)
class KnowsSoteria(Adaptation):
    """Soteria: the zeroed columns of the last layer's weight are left out, or that weight as a whole.

    leave_out: "columns" or "layer". starts: how often the search begins again while its loss is above what rounding
    explains, >= 1. stages: with several local steps, how often the columns that each step zeroed are computed again
    from the guess, >= 0; the first stage does not match the layer.
    Assumes: a model that ends in a linear layer; the client's local training for several steps. After one step all
    matched entries are exact.
    Cannot: use the features of the zeroed columns; the convolutions before them are enough.
    """

    exact: ClassVar[bool] = True

    leave_out: Literal["columns", "layer"] = "columns"
    starts: int = 6
    stages: int = 4

    def __post_init__(self) -> None:
        require_choice("leave_out", self.leave_out, ("columns", "layer"))
        require_at_least(1, starts=self.starts)
        require_at_least(0, stages=self.stages)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        attack = zeros_are_the_defenses(attack)
        if any(pruned_steps(self.defense, each) for each in seen):
            return attack, list(seen)
        return until_explained(attack, seen, self.starts), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        name = last_weight(view.trainer.model, seen)
        if name not in view.target:
            return view
        summed = pruned_steps(self.defense, seen) and not view.steps
        if summed or (self.leave_out == "layer" and not pruned_steps(self.defense, seen)):
            return without(view, [name], "the last layer's weight is not matched")
        weight = view.target[name]
        kept = (weight != 0).any(0, keepdim=True).to(weight.dtype).expand_as(weight).clone()
        return weighing(view, {name: kept}, "zero columns of the last layer are not matched")

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        if not any(pruned_steps(self.defense, each) for each in seen):
            return super().solve(attack, seen, rng=rng, progress=progress)
        layer = last_weight(seen[0].model, seen[0])
        stages = self.stages if self.leave_out == "columns" else 0
        return in_stages(attack, PrunedAlike(self.defense, layer), stages, seen, rng=rng, progress=progress)
