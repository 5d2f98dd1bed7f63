"""Against percentile privacy: exact entries are matched, cut and dropped ones are bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leaktight.adaptive.intervals import within
from leaktight.adaptive.knowing import Adaptation, scale_free, weighing, zeros_are_the_defenses
from leaktight.adaptive.stages import until_explained
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.errors import require_at_least
from leaktight.core.types import Observation, Params
from leaktight.defenses.percentile_privacy import PercentilePrivacy

_ROUNDING = 1e-5  # of the bound: it is applied in float32, to the change divided by the number of steps


@dataclass(frozen=True, kw_only=True)
class KnowsPercentile(Adaptation):
    """Percentile privacy: entries between the two bounds are exact; the others count by how far they are beyond.

    starts: how often the search begins again while its loss is above what rounding explains, >= 1.

    A cut entry is at least the bound, with its sign; a dropped one is at most the smallest entry that was sent. A guess
    that satisfies these costs nothing there.
    Assumes: the number of local steps and the learning rate, for the bounds. If they are not disclosed, only exact
    entries are matched.
    Cannot: see how large a cut entry was. If all entries are cut (gamma far below the update), signs are left.
    """

    exact: ClassVar[bool] = True

    starts: int = 6

    def __post_init__(self) -> None:
        require_at_least(1, starts=self.starts)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        attack = replace(zeros_are_the_defenses(attack), objective=scale_free(attack.objective))
        return until_explained(attack, seen, self.starts), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        assert isinstance(self.defense, PercentilePrivacy)
        sent = seen.update.tensors
        if seen.update.kind == "delta" and not view.steps:
            bound = largest(sent)
        else:
            bound = self.defense.bound(len(view.steps) or 1)
        cut = {name: tensor.abs() >= bound * (1 - _ROUNDING) for name, tensor in sent.items() if tensor.ndim}
        if seen.update.kind == "delta" and not view.steps:
            exact = {name: ((sent[name] != 0) & ~mask).to(view.precision) for name, mask in cut.items()}
            return weighing(view, exact, "entries that were cut or dropped are not matched")
        low, high = intervals({name: sent[name].to(view.precision) for name in cut}, cut)
        return within(view, low, high, "entries that were cut or dropped are matched by their bounds")


def largest(tensors: Params) -> float:
    """The largest magnitude."""
    return max(float(tensor.abs().max()) for tensor in tensors.values() if tensor.numel())


def intervals(sent: Params, cut: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is known of each entry, as the smallest and the largest possible value. cut: which entries are at a bound.

    >>> import torch
    >>> sent = torch.tensor([0.5, -2.0, 0.0])
    >>> low, high = intervals({"": sent}, {"": sent.abs() == 2})
    >>> low[""], high[""]
    (tensor([ 0.5000,    -inf, -0.5000]), tensor([ 0.5000, -2.0000,  0.5000]))
    """
    sizes = torch.cat([tensor.flatten() for tensor in sent.values()]).abs()
    smallest = float(sizes[sizes > 0].min()) if bool(sizes.any()) else math.inf
    low, high = {}, {}
    for name, tensor in sent.items():
        around = torch.where(tensor == 0, smallest, 0.0)
        low[name] = torch.where(cut[name] & (tensor < 0), -math.inf, tensor - around)
        high[name] = torch.where(cut[name] & (tensor > 0), math.inf, tensor + around)
    return low, high
