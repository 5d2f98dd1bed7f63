"""Against Soteria: only the last layer's weight was changed, and zeros show where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from leaktight.adaptive.knowing import Adaptation, last_weight, weighing, without, zeros_are_the_defenses
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.types import Observation
from leaktight.models.source import require_choice


@dataclass(frozen=True, kw_only=True)
class KnowsSoteria(Adaptation):
    """Soteria: the zeroed columns of the last layer's weight are left out, or that weight as a whole.

    leave_out: "columns" or "layer". After several local steps it is always the layer, as a column may be zero in some
    steps only.
    Assumes: a model that ends in a linear layer. All matched entries are exact.
    Cannot: use the features of the zeroed columns; the convolutions before them are enough.
    """

    exact: ClassVar[bool] = True

    leave_out: Literal["columns", "layer"] = "columns"

    def __post_init__(self) -> None:
        require_choice("leave_out", self.leave_out, ("columns", "layer"))

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        return zeros_are_the_defenses(attack), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        name = last_weight(view.trainer.model, seen)
        if name not in view.target:
            return view
        local, count = seen.local_training, seen.batch_size or 1
        several = seen.update.kind == "delta" and (local is None or local.num_steps(count) > 1)
        if self.leave_out == "layer" or several:
            return without(view, [name], "the last layer's weight is not matched")
        weight = view.target[name]
        kept = (weight != 0).any(0, keepdim=True).to(weight.dtype).expand_as(weight).clone()
        return weighing(view, {name: kept}, "zero columns of the last layer are not matched")
