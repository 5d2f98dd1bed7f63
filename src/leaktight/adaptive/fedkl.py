"""Against FedKL: the scale and shift of every locked channel are searched for together with the images."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from leaktight.adaptive.knowing import Adaptation, labels_from_bias, without
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import Unknown, View
from leaktight.core.errors import require_at_least
from leaktight.core.types import Observation
from leaktight.defenses.fedkl import FedKl
from leaktight.models.keylock import LOCK, scale_blocks

_SOLVED = 1e-12


@dataclass(frozen=True, kw_only=True)
class KnowsFedKl(Adaptation):
    """FedKL: the scales and shifts of the locked channels are unknowns of the search; the locked block is not matched.

    ignore_locked: do not match the gradients of locked convolutions. If every block is locked they are matched anyway,
    as little else would be left.
    spread: standard deviation of the first scales and shifts, around zero, >= 0; in a new lock it is about a third.
    restarts: the most starts, >= 1, unless the attack has more, as a search cannot change the sign of some scales; the
    search ends with the first restart whose loss is below 1e-12.

    Key and lock only scale and shift each channel: 2 O numbers for O channels. Labels that would be searched for are
    read from the last layer, which is not locked.
    Assumes: the architecture, which is public.
    Cannot: follow changes of the lock within a round of several steps, where it counts as constant; nor run a locked
    norm in evaluation mode, as its statistics are private. On photographs of 32x32 many images explain the update
    nearly alike, and the one found is a rough likeness.
    """

    ignore_locked: bool = True
    spread: float = 0.33
    restarts: int = 8

    def __post_init__(self) -> None:
        require_at_least(0, spread=self.spread)
        require_at_least(1, restarts=self.restarts)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        enough = _SOLVED if attack.stop_below is None else attack.stop_below
        attack = replace(attack, restarts=max(attack.restarts, self.restarts), stop_below=enough)
        return labels_from_bias(attack, seen[0]), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        assert isinstance(self.defense, FedKl)
        model = copy.deepcopy(view.trainer.model)
        blocks = scale_blocks(model, self.defense.blocks)
        like = next(iter(view.params.values()))
        buffers: dict[str, Tensor] = {
            f"{block.norm}.{LOCK}.{part}": getattr(model.get_submodule(f"{block.norm}.{LOCK}"), part).to(like).mul(0)
            for block in blocks
            for part in ("scale", "shift")
        }
        view = replace(
            view,
            trainer=replace(view.trainer, model=model),
            buffers={**view.buffers, **buffers},
            unknowns={**view.unknowns, **{name: Unknown(start, self.spread) for name, start in buffers.items()}},
            notes=(*view.notes, "scales and shifts of locked channels are unknown"),
        )
        if not self.ignore_locked or self.defense.blocks == "all":
            return view
        locked = [f"{block.conv}.{part}" for block in blocks for part in ("weight", "bias")]
        return without(view, locked, "locked convolutions are not matched")
