"""Against compression and Soteria: entries that the defense made zero are not matched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from leaktight.adaptive.knowing import Adaptation, last_weight, visible, weighing, without, zeros_are_the_defenses
from leaktight.adaptive.pruning import PrunedAlike, pruned_steps
from leaktight.adaptive.stages import often_in_stages, until_explained
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.errors import require_at_least
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Reconstruction
from leaktight.models.source import require_choice

_STAGED_STARTS = 3  # at most so many if each of them has several stages


@dataclass(frozen=True, kw_only=True)
class _KnowsPruning(Adaptation):
    """A defense that makes entries zero: after one step the others are exact; several pruned steps take stages.

    starts: how often the search begins again while its loss is above what rounding explains, >= 1.
    stages: with several pruned steps, how often the entries that each step pruned are computed again, >= 0.
    """

    exact: ClassVar[bool] = True

    starts: int = 6
    stages: int = 6

    def __post_init__(self) -> None:
        require_at_least(1, starts=self.starts)
        require_at_least(0, stages=self.stages)

    def layer(self, seen: Observation) -> str:
        """The only tensor that is pruned; empty if all are."""
        return ""

    @property
    def further_stages(self) -> int:
        return self.stages

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        attack = zeros_are_the_defenses(attack)
        if any(pruned_steps(self.defense, each) for each in seen):  # the first stage cannot explain the update
            return attack, list(seen)
        return until_explained(attack, seen, self.starts), list(seen)

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        if not any(pruned_steps(self.defense, each) for each in seen):
            return super().solve(attack, seen, rng=rng, progress=progress)
        judging, starts = PrunedAlike(self.defense, self.layer(seen[0])), min(_STAGED_STARTS, self.starts)
        return often_in_stages(attack, judging, self.further_stages, seen, starts=starts, rng=rng, progress=progress)


@dataclass(frozen=True, kw_only=True)
class KnowsSupport(_KnowsPruning):
    """Gradient compression: entries that are zero in the update are left out of the distance.

    starts: how often the search begins again while its loss is above what rounding explains, >= 1.
    stages: with several pruned steps, how often the entries that each step pruned are computed again from the guess.

    After one step the remaining entries are exact. After several, an entry is the sum over the steps that kept it: the
    steps of a guess are pruned alike, at first where the update is zero, then where the steps of the last guess are.
    Assumes: nothing for one step; the client's local training for several.
    Cannot: know the size of a pruned entry, only that it was not among the largest.
    """

    def view(self, view: View, seen: Observation) -> View:
        return weighing(view, visible(seen.update.tensors), "zeros of the update are not matched")


@dataclass(frozen=True, kw_only=True)
class KnowsSoteria(_KnowsPruning):
    """Soteria: the zeroed columns of the last layer's weight are left out, or that weight as a whole.

    leave_out: "columns" or "layer". starts: how often the search begins again while its loss is above what rounding
    explains, >= 1. stages: with several local steps, how often the columns that each step zeroed are computed again
    from the guess, >= 0; the first stage does not match the layer.
    Assumes: a model that ends in a linear layer; the client's local training for several steps. After one step all
    matched entries are exact.
    Cannot: use the features of the zeroed columns; the convolutions before them are enough.
    """

    leave_out: Literal["columns", "layer"] = "columns"
    stages: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("leave_out", self.leave_out, ("columns", "layer"))

    def layer(self, seen: Observation) -> str:
        return last_weight(seen.model, seen)

    @property
    def further_stages(self) -> int:
        return self.stages if self.leave_out == "columns" else 0

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
