"""Against compression and min-max sampling: what is zero says little, what is left says all; match on what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from leaktight.adaptive.knowing import Adaptation, weighing, zeros_are_the_defenses
from leaktight.adaptive.stages import Judging, in_stages
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Params, Reconstruction
from leaktight.defenses.minmax import MinMaxSampling

_LAPLACE = torch.linspace(0.5e-2, 30 - 0.5e-2, 3000, dtype=torch.float64)  # midpoints, in units of its mean size


@dataclass(frozen=True, kw_only=True)
class KnowsSupport(Adaptation):
    """Gradient compression: entries that are zero in the update are left out of the distance.

    Assumes: nothing. After one local step the entries that are left are exact.
    Cannot: tell how small a pruned entry was, beyond its not being among the largest. After several steps that were
    pruned one by one, an entry is the sum over those steps in which it survived, and so only near to the truth.
    """

    exact: ClassVar[bool] = True

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        return zeros_are_the_defenses(attack), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        visible = {name: (tensor != 0).to(tensor.dtype) for name, tensor in seen.update.tensors.items()}
        return weighing(view, visible, "zeros of the update are not matched")


@dataclass(frozen=True, kw_only=True)
class KnowsSampling(KnowsSupport):
    """Min-max sampling: the visible entries alone; the values of the unbiased form are solved for, with a guess's help.

    stages: how often the solutions are chosen anew.

    An entry g is sent as v = g + C / g. Its size is at least 2 sqrt(C), and close to that for some entry, which gives C
    away. That leaves two solutions for every entry. Which is likelier at first follows from how many entries of its
    tensor were drawn; after that, the one that is nearer to the guess is taken, and the search goes on from there.
    Assumes: one local step, or sampling of the whole update (at = "update"); many entries are sent.
    Cannot: see entries that were not drawn. Values of several steps that were sampled one by one are not solved for.
    """

    stages: int = 6

    def __post_init__(self) -> None:
        if self.stages < 0:
            raise ValueError(f"expected stages >= 0, got {self.stages}")

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        if not all(self._solvable(each) for each in seen):
            return super().solve(attack, seen, rng=rng, progress=progress)
        return in_stages(attack, WhichSolution(), self.stages, seen, rng=rng, progress=progress)

    def _solvable(self, seen: Observation) -> bool:
        """Whether values were changed, in what was sent and not in steps before they were added up."""
        assert isinstance(self.defense, MinMaxSampling)
        local, count = seen.local_training, seen.batch_size
        one_step = seen.update.kind == "gradient" or (local and count and local.num_steps(count) == 1)
        changed = self.defense.unbiased and self.defense.keep_share < 1
        return changed and (self.defense.at == "update" or bool(one_step))


@dataclass(frozen=True)
class WhichSolution(Judging):
    """Of the two solutions of every entry the likelier, weighed by how sure that is; then the one nearer to a guess."""

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
    """The two solutions g of v = g + C / g for every entry of a tensor, and the odds of the smaller; 0 where v is 0."""

    small: Tensor
    large: Tensor
    odds: Tensor


def solutions(tensors: Params) -> dict[str, Solutions]:
    """What may stand behind an unbiased sample, in float64.

    With g = sqrt(C) t, the solutions are t and 1 / t. For entries of a Laplace law of mean size s their odds are
    e^((t - 1/t) sqrt(C) / s) / t^4, the second factor for how likely each is to be drawn and to fall on this v.
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
    """The mean size, in units of sqrt(C), of entries of a Laplace law of which such a share is drawn.

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
    """A view with other values to come close to."""
    return replace(view, target={name: values[name].to(tensor) for name, tensor in view.target.items()})
