"""GGL's adaptive transforms: the defense is applied to the update of the guess too.

Its strength is estimated from the observed update. The attackers of `leaktight.adaptive` know the defense's settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from leaktight.attacks.matching.view import Around, View
from leaktight.core.protocols import Defense, Report
from leaktight.core.rng import Rng
from leaktight.core.tensors import squared_norm
from leaktight.core.types import Observation, State, Update
from leaktight.models.source import require_choice
from leaktight.models.surgery import final_linear

Expected: TypeAlias = Literal["none", "clipping", "compression", "soteria"]


@dataclass(frozen=True, kw_only=True)
class AsSeen(Around):
    """Match as `inner` does, with the updates of guesses transformed like the observed one.

    defense: "clipping", to the norm of the observed update; "compression", in each tensor as many of the smallest
    entries become zero as are zero in the observed one; "soteria", the columns of the last linear layer that are zero
    in the observed update become zero; "none". A change after several steps is transformed as a whole.
    Reference: Li et al., Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage, CVPR 2022.
    """

    defense: Expected = "none"

    def __post_init__(self) -> None:
        require_choice("defense", self.defense, _TRANSFORMS)

    def changed(self, view: View, seen: Observation) -> View:
        return _TRANSFORMS[self.defense](view, seen)


@dataclass(frozen=True)
class _ClippedTo(Defense):
    """Clips the whole update, as a pure function of tensors."""

    norm: float
    names: tuple[str, ...]

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        squares = torch.stack([update.tensors[name].square().sum() for name in self.names]).sum()
        factor = (self.norm / (squares + torch.finfo(squares.dtype).tiny).sqrt()).clamp(max=1)
        return replace(update, tensors={name: factor * tensor for name, tensor in update.tensors.items()}), state


@dataclass(frozen=True)
class _WithZeros(Defense):
    """Compresses each tensor, as a pure function of tensors. zeros: pairs of a name and how many entries to remove."""

    zeros: tuple[tuple[str, int], ...]

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        pruned = {name: _pruned(update.tensors[name], count) for name, count in self.zeros}
        return replace(update, tensors={**update.tensors, **pruned}), state


def _pruned(tensor: Tensor, count: int) -> Tensor:
    """The tensor with its `count` smallest entries, and those that equal the largest of them, set to zero."""
    sizes = tensor.detach().abs()
    bound = sizes.flatten().sort().values[count - 1]
    return tensor * (sizes > bound).to(tensor.dtype)


def _clipping(view: View, seen: Observation) -> View:
    norm = float(squared_norm(view.target.values()).sqrt())
    return _mimicking(view, _ClippedTo(norm, tuple(view.target)), "guesses are clipped to the norm of the update")


def _compression(view: View, seen: Observation) -> View:
    zeros = tuple((name, int((tensor == 0).sum())) for name, tensor in view.target.items())
    present = tuple((name, count) for name, count in zeros if count)
    return _mimicking(view, _WithZeros(present), "guesses are pruned as far as the update") if present else view


def _soteria(view: View, seen: Observation) -> View:
    blank = seen.inputs.blank(1, next(view.trainer.model.parameters()))
    layer, _ = final_linear(view.trainer.model, blank)
    name = f"{layer}.weight" if layer else "weight"
    if name not in view.target:
        return view
    weight = view.target[name]
    kept = (weight != 0).any(0, keepdim=True).to(weight.dtype).expand_as(weight).clone()
    note = "zero columns of the last layer are masked"
    return replace(view, weights={**view.weights, name: kept}, notes=(*view.notes, note))


def _mimicking(view: View, mimic: Defense, note: str) -> View:
    return replace(view, trainer=replace(view.trainer, defense=mimic), notes=(*view.notes, note))


_TRANSFORMS: Mapping[str, Callable[[View, Observation], View]] = {
    "none": lambda view, seen: view,
    "clipping": _clipping,
    "compression": _compression,
    "soteria": _soteria,
}
