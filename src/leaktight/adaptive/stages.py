"""A search in stages: each stage reads the update in a way that depends on the last guess, and starts from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import Around, View
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Observation, Params, Reconstruction

_SAME = 1e-4  # a stage that moves every pixel by less than this is the last


class Judging(ABC):
    """Changes the view of an update by comparing it with a guess."""

    @abstractmethod
    def judged(self, view: View, guessed: Params | None) -> View:
        """The changed view. guessed: the update of the guess; None before the first guess."""


@dataclass(frozen=True, kw_only=True)
class Judged(Around):
    """Match as `inner` does, with the view changed by `judging`. guess: that of the last stage, if any."""

    judging: Judging
    guess: Batch | None = None

    def changed(self, view: View, seen: Observation) -> View:
        if self.guess is None:
            return self.judging.judged(view, None)
        images = self.guess.inputs.to(view.precision)
        with torch.no_grad():
            guessed = view.guess(images, self.guess.targets, view.params, view.buffers, view.starts)
        return self.judging.judged(view, guessed)


def in_stages(
    attack: Matching,
    judging: Judging,
    stages: int,
    seen: Sequence[Observation],
    *,
    rng: Rng,
    progress: Progress | None,
) -> Reconstruction:
    """Run the attack, then up to `stages` further stages, each from the last guess, until the guess stays the same.

    The further stages have one restart and half the iterations.
    """
    begin = replace(attack, matched=Judged(inner=attack.matched, judging=judging))
    found = begin.reconstruct(seen, rng=rng, progress=progress)
    first_loss = found.first_loss
    for stage in range(stages):
        before = found.guess
        again = replace(
            attack,
            matched=Judged(inner=attack.matched, judging=judging, guess=before),
            sought=attack.sought.again(before.inputs),
            labels=_EarlierLabels(labels=before.targets),
            iterations=max(1, attack.iterations // 2),
            restarts=1,
            consensus=0.0,
        )
        found = again.reconstruct(seen, rng=rng.child("stage", stage), progress=progress)
        if float((found.guess.inputs - before.inputs).abs().max()) < _SAME:
            break
    return replace(found, first_loss=first_loss)


@dataclass(frozen=True, kw_only=True)
class _EarlierLabels(LabelStrategy):
    """The labels of an earlier guess, in the order of its images."""

    labels: Tensor

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        return self.labels.clone()
