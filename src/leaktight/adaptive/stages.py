"""Searches that are repeated: in stages whose view depends on the last guess, or from new starts until one succeeds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import Around, View
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.tensors import squared_norm
from leaktight.core.types import Batch, Observation, Params, Reconstruction

_EXPLAINED = 1e-12  # 1 - cosine; float32 gradients leave 1e-14
_MARGIN = 4.0
_LONGER = 1.5  # times the iterations of a start that ends by itself where its loss stands still
_SAME = 1e-4  # a stage that moves every pixel by less than this is the last


class Judging(ABC):
    """Changes the view of an update by comparing it with a guess."""

    @abstractmethod
    def judged(self, view: View, guessed: Params | None) -> View:
        """The changed view. guessed: the update of the guess; None before the first guess."""

    def after(self, view: View, guess: Batch | None) -> View:
        """The changed view, from the guess itself."""
        return self.judged(view, None if guess is None else update_of(view, guess))


def update_of(view: View, guess: Batch) -> Params:
    """The update of a guess, with unknowns at their mean initial values."""
    with torch.no_grad():
        return view.guess(guess.inputs.to(view.precision), guess.targets, view.params, view.buffers, view.starts)


@dataclass(frozen=True, kw_only=True)
class Judged(Around):
    """Match as `inner` does, with the view changed by `judging`. guess: that of the last stage, if any."""

    judging: Judging
    guess: Batch | None = None

    def changed(self, view: View, seen: Observation) -> View:
        return self.judging.after(view, self.guess)


def often_in_stages(
    attack: Matching,
    judging: Judging,
    stages: int,
    seen: Sequence[Observation],
    *,
    starts: int,
    rng: Rng,
    progress: Progress | None,
) -> Reconstruction:
    """`in_stages` from the beginning, again until the loss of the last stage is what rounding explains; the best."""
    limit = until_explained(attack, seen, starts)
    best: Reconstruction | None = None
    for number in range(limit.restarts):
        own = rng if number == 0 else rng.child("start", number)
        found = in_stages(attack, judging, stages, seen, rng=own, progress=progress)
        best = found if best is None or found.loss < best.loss else best
        if limit.stop_below is None or best.loss < limit.stop_below:
            break
    assert best is not None
    return best


def continued(attack: Matching, guess: Batch) -> Matching:
    """The attack with one restart, which starts at a guess, with half the iterations."""
    return replace(
        attack,
        sought=attack.sought.again(guess.inputs),
        labels=EarlierLabels(labels=guess.targets),
        iterations=max(1, attack.iterations // 2),
        restarts=1,
        consensus=0.0,
    )


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
        matched = Judged(inner=attack.matched, judging=judging, guess=before)
        again = replace(continued(attack, before), matched=matched)
        found = again.reconstruct(seen, rng=rng.child("stage", stage), progress=progress)
        if float((found.guess.inputs - before.inputs).abs().max()) < _SAME:
            break
    return replace(found, first_loss=first_loss)


@dataclass(frozen=True, kw_only=True)
class EarlierLabels(LabelStrategy):
    """The labels of an earlier guess, in the order of its images."""

    ordered: ClassVar[bool] = True

    labels: Tensor

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        return self.labels.clone()


def until_explained(attack: Matching, seen: Sequence[Observation], starts: int) -> Matching:
    """An attack that begins again until its loss is no more than rounding explains, at most `starts` times.

    The loss of a failed start is larger by orders of magnitude, so that it is told without the truth. Only for L-BFGS
    in float64: rounding in the search, or slow convergence, would look like a failure. With patience a failed start
    ends early, so that each may take longer, and one whose loss still falls at its end is the last.
    """
    if not attack.optimizer.smooth or attack.precision != "float64" or attack.consensus:
        return attack
    least = max(_EXPLAINED, _MARGIN * max(map(rounding_loss, seen)))
    return replace(
        attack,
        restarts=max(attack.restarts, starts),
        stop_below=max(least, attack.stop_below or 0.0),
        iterations=attack.iterations if attack.patience is None else int(_LONGER * attack.iterations),
    )


def rounding_loss(seen: Observation) -> float:
    """1 - cosine that rounding alone leaves: a model change is a difference of parameters that were rounded."""
    if seen.update.kind == "gradient":
        return 0.0
    square = float(squared_norm(seen.update.tensors.values()))
    kept = [seen.broadcast.params[name] for name in seen.update.tensors]
    errors = [torch.finfo(tensor.dtype).eps / 2 * tensor.detach().to(torch.float64) for tensor in kept]
    steps = seen.num_steps or 1
    return steps * float(squared_norm(errors)) / (2 * square) if square else 0.0
