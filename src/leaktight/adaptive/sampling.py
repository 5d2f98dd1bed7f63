"""Against min-max sampling: sampled values are solved for, and the rest is known to be small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from leaktight.adaptive.knowing import Adaptation, Case, visible, weighing, zeros_are_the_defenses
from leaktight.adaptive.pruning import trusted
from leaktight.adaptive.stages import Judging, often_in_stages
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.errors import require_at_least
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Params, Reconstruction
from leaktight.defenses.minmax import MinMaxSampling

_LAPLACE = torch.linspace(0.5e-2, 30 - 0.5e-2, 3000, dtype=torch.float64)  # where the density is integrated
_LEAST_ERROR = 0.3  # of a sampled value in the first stage, in units of sqrt(C)


@dataclass(frozen=True, kw_only=True)
class KnowsSampling(Adaptation):
    """Min-max sampling: the values of the unbiased form are solved for, in stages, with a guess's help.

    stages: how often the solutions are chosen again, >= 0. starts: how often the search begins again while its loss is
    above what rounding explains, >= 1.

    An entry g is sent as v = g + C / g. Its size is at least 2 sqrt(C), and close to that for some entry, which reveals
    C. Every entry then has two solutions. The first stage matches their mean, by how likely they are if as many entries
    of the tensor are sampled, and zero where nothing was sampled; entries count by their standard deviation. Later
    stages match sampled entries alone, with the solution nearer to the guess; those that fit neither count little.
    Values that were sampled without `unbiased` are exact, and matched alone.
    Assumes: one local step, or sampling of the whole update (at = "update"); many entries are sent.
    Cannot: find the solutions on networks of ReLU, where it declines, or for several steps that were each sampled; then
    the update is matched where it is not zero.
    """

    exact: ClassVar[bool] = True

    stages: int = 10
    starts: int = 3

    def __post_init__(self) -> None:
        require_at_least(0, stages=self.stages)
        require_at_least(1, starts=self.starts)

    def unable(self, case: Case) -> str | None:
        if any(isinstance(module, nn.ReLU) for module in case.model.modules()):
            return "on networks of ReLU the sampled values cannot be solved for from a first guess"
        return None

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        return zeros_are_the_defenses(attack), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        return (
            view
            if self._solvable(seen)
            else weighing(view, visible(view.target), "zeros of the update are not matched")
        )

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        if not all(self._solvable(each) for each in seen):
            return super().solve(attack, seen, rng=rng, progress=progress)
        return often_in_stages(
            attack, WhichSolution(), self.stages, seen, starts=self.starts, rng=rng, progress=progress
        )

    def _solvable(self, seen: Observation) -> bool:
        """Whether the defense changed the values of the update itself, and not of several steps before their sum."""
        assert isinstance(self.defense, MinMaxSampling)
        one_step = seen.update.kind == "gradient" or seen.num_steps == 1
        changed = self.defense.unbiased and self.defense.keep_share < 1
        return changed and (self.defense.at == "update" or one_step)


@dataclass(frozen=True)
class WhichSolution(Judging):
    """First the mean of the solutions of every entry, and zeros; then the solution nearer to the guess."""

    def judged(self, view: View, guessed: Params | None) -> View:
        solved = solutions(view.target)
        if guessed is None:
            means, weights = {}, {}
            for name, each in solved.items():
                means[name], weights[name] = expected(each)
            return weighing(_aimed(view, means), weights, "values of the unbiased estimate solved for")
        nearer = {}
        for name, each in solved.items():
            own = guessed[name].to(each.small)
            nearer[name] = torch.where((own - each.small).abs() < (own - each.large).abs(), each.small, each.large)
        trust = trusted({name: guessed[name] - value.to(guessed[name]) for name, value in nearer.items()}, view.target)
        weights = {name: mask * trust[name] for name, mask in visible(view.target).items()}
        return weighing(_aimed(view, nearer), weights, "values of the unbiased estimate solved for")


def expected(solved: Solutions) -> tuple[Tensor, Tensor]:
    """The mean of the solutions of every entry by their odds, 0 if it was not sampled, and its weight.

    The weight is sqrt(C) times a constant, over the standard deviation, with a least one for sampled entries.
    """
    small = solved.odds / (1 + solved.odds)
    drawn = solved.large != 0
    root = (solved.small * solved.large)[drawn].abs().max().sqrt() if bool(drawn.any()) else 1.0
    share = (int(drawn.sum()) + 0.5) / (drawn.numel() + 1)
    squares = (mean_size(share) * _LAPLACE).square()
    density = (-_LAPLACE).exp()
    not_drawn = float((density * squares / (squares + 1)).sum() / density.sum()) / (1 - share)
    between = small * (1 - small) * ((solved.large - solved.small) / root).square()
    variance = torch.where(drawn, between, not_drawn) + _LEAST_ERROR**2
    return small * solved.small + (1 - small) * solved.large, _LEAST_ERROR / variance.sqrt()


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
