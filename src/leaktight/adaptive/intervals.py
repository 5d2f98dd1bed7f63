"""Entries of which only an interval is known: the update of a guess counts by its distance from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from leaktight.adaptive.knowing import mimicking
from leaktight.attacks.matching.view import View
from leaktight.core.protocols import Defense, Report
from leaktight.core.rng import Rng
from leaktight.core.types import Params, State, Update


@dataclass(frozen=True)
class _Within(Defense):
    """Replaces entries of a guess's update by the target plus their distance from what is known of them."""

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        moved = dict(update.tensors)
        for name, tensor in update.tensors.items():
            if _low(name) in state:
                known = tensor.maximum(state[_low(name)]).minimum(state[_high(name)])
                moved[name] = state[_seen(name)] + (tensor - known)
        return replace(update, tensors=moved), state


def within(view: View, low: Params, high: Params, note: str) -> View:
    """A view in which an entry of a guess is right anywhere in [low, high]; where both are the target, it is exact.

    The objective then sees target + (guess - nearest value of the interval), which is the target for every guess that
    fits. low, high: by the name of a tensor, of the target's shape, in the units of the client's update.
    """
    held = dict(view.held)
    for name, tensor in low.items():
        if name in view.target:
            held |= {_low(name): tensor, _high(name): high[name], _seen(name): view.target[name].clone()}
    return mimicking(replace(view, held=held, notes=(*view.notes, note)), _Within())


def _low(name: str) -> str:
    return f"within.low:{name}"


def _high(name: str) -> str:
    return f"within.high:{name}"


def _seen(name: str) -> str:
    return f"within.seen:{name}"
