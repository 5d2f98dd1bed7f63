"""Against compression and Soteria: entries that the defense made zero are not matched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from leaktight.adaptive.knowing import (
    Adaptation,
    last_weight,
    often_in_stages,
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
from leaktight.core.types import Observation, Reconstruction
from leaktight.models.source import require_choice

_STAGED_STARTS = 3  # at most so many if each of them has several stages


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
        judging, starts = PrunedAlike(self.defense), min(_STAGED_STARTS, self.starts)
        return often_in_stages(attack, judging, self.stages, seen, starts=starts, rng=rng, progress=progress)


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
        judging, starts = PrunedAlike(self.defense, layer), min(_STAGED_STARTS, self.starts)
        return often_in_stages(attack, judging, stages, seen, starts=starts, rng=rng, progress=progress)
