"""Against clipping: the updates of guesses are clipped too, and only directions are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from leaktight.adaptive.knowing import Adaptation, mimicking, scale_free
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Params, State, Update
from leaktight.defenses.clipping import Clipping
from leaktight.defenses.dp_sgd import clipped_mean

Groups = Sequence[Sequence[str]]


@dataclass(frozen=True)
class _Clipped(Defense):
    """Clipping as a pure function of tensors, each group of names by itself.

    at: clip each step's gradient or the update. each_example: clip the gradient of each example before the mean.
    """

    groups: Groups
    clip_norm: float
    at: Literal["step", "update"] = "step"
    each_example: bool = False

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        if self.at != "step":
            return step.gradient, state
        if self.each_example and len(step.batch) > 1:
            return clipped_mean(step.per_example(), self.groups, self.clip_norm)[0], state
        return self._clip(step.gradient), state

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        if self.at != "update":
            return update, state
        return replace(update, tensors=self._clip(update.tensors)), state

    def _clip(self, tensors: Params) -> Params:
        return clipped_mean({name: tensor[None] for name, tensor in tensors.items()}, self.groups, self.clip_norm)[0]


def clipping_alike(
    view: View,
    groups: Groups,
    clip_norm: float,
    *,
    num_examples: int,
    at: Literal["step", "update"] = "step",
    each_example: bool = False,
) -> View:
    """A view that clips guesses, unless that would only change the length of their update, which is not compared."""
    several_steps = at == "step" and len(view.steps) > 1
    apart = len(groups) > 1 or (each_example and num_examples > 1)
    if not math.isfinite(clip_norm) or not (several_steps or apart):
        return view
    return mimicking(view, _Clipped(groups, clip_norm, at, each_example))


@dataclass(frozen=True, kw_only=True)
class KnowsClipping(Adaptation):
    """Clipping to a known norm: cosine, and the guess's gradient is clipped as the client clips.

    Assumes: nothing beyond the settings. Clipping one step as a whole changes its length, which the cosine ignores.
    Cannot: recover the original length of a clipped tensor, example or step.
    """

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        return replace(attack, objective=scale_free(attack.objective)), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        assert isinstance(self.defense, Clipping)
        names = list(view.params)
        groups = [[name] for name in names] if self.defense.scope == "layer" else [names]
        return clipping_alike(
            view,
            groups,
            self.defense.clip_norm,
            num_examples=seen.batch_size or 1,
            at=self.defense.at,
            each_example=self.defense.scope == "example",
        )
