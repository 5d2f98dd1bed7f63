"""Against AdaDefense: stand-ins are solved for the gradient, in a client's first round and, as its moments are
followed, in those after it; where the moments are unknown, soft signs are matched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leaktight.adaptive.knowing import Adaptation, Case, labels_from_bias, mimicking, scale_free, weighing
from leaktight.adaptive.moments import Moments, Solved, first_step, fitted_factor, nearest, settled, solved
from leaktight.adaptive.noise import usual_contrast
from leaktight.adaptive.stages import continued, update_of
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.problem import Prior
from leaktight.attacks.matching.view import Around, View
from leaktight.core.errors import require_above, require_at_least
from leaktight.core.protocols import Defense, Progress, Report
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Observation, Params, Reconstruction, State, Update
from leaktight.defenses.adadefense import AdaDefense

_ARITHMETIC = 1e-6  # error of a client's own gradient in float32, in units of the root mean square of the tensor
_CONTRASTS = (0.05, 0.3)  # of photographs and of the embedded digits; guesses on the way may be blank, or noise
_FAILED = 4.0  # misfit of a search that did not find the images; about 0.5 where rounding is the only error
_EXPLAINED = 1.0  # misfit up to which the errors of entries are about right
_PATIENCE = 100  # evaluations of L-BFGS without progress that end a stage


@dataclass(frozen=True)
class _SoftSigns(Defense):
    """Replaces entries g by g / sqrt(g^2 + (width rms)^2), with rms the root mean square of the tensor."""

    width: float

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        tensors = {}
        for name, tensor in update.tensors.items():
            square = tensor.square()
            tiny = torch.finfo(tensor.dtype).tiny
            tensors[name] = tensor / (square + self.width**2 * square.mean() + tiny).sqrt()
        return replace(update, tensors=tensors), state


@dataclass(frozen=True, kw_only=True)
class KnowsAdaDefense(Adaptation):
    """AdaDefense: stand-ins are solved for the gradient, entry by entry, and the gradient is matched.

    floors: of the stages of a search, > 0. In a stage an entry counts by its standard error s as 1 / sqrt(f^2 + s^2),
    where f is the floor times the root mean square of the update: high floors find the way, low ones let the most
    precise entries count. Every stage starts at the last guess.
    contrast: the expected mean difference of neighbouring pixels, > 0, for a total variation as strong as rounding asks
    for; None: that of the public data if disclosed, else of the last guess, within 0.05 and 0.3.
    attempts: searches while the guess does not explain the stand-in, >= 1. width: of the soft signs, > 0.

    In a client's first round the moments are zero, and the stand-in has one solution; it is exact up to rounding, which
    costs large entries most. In a later round the moments follow from the earlier ones (`Observation.earlier`): the
    solutions and the update of the guess give the gradient of each. The equation then has one solution or two. Entries
    with two count once a guess is clearly nearer to one of them.
    The answer is the last stage, unless an earlier one explains the stand-in better. Labels that would be searched for
    are read from the last layer's bias, whose gradient is p - y. A server's factor on the stand-ins of an aggregate is
    read from the largest one; it has to have three digits.
    Assumes: all rounds of the client since its first are seen.
    Cannot: solve a later round alone, where two moments of every entry are unknown: signs are left, which are compared
    with soft signs of the guess's update. Nor the mean of several clients' stand-ins.
    """

    exact: ClassVar[bool] = True

    floors: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    contrast: float | None = None
    attempts: int = 3
    width: float = 0.3

    def __post_init__(self) -> None:
        require_above(0, contrast=self.contrast, width=self.width, **{f"floor {each}": each for each in self.floors})
        require_at_least(1, attempts=self.attempts, floors=len(self.floors))

    def unable(self, case: Case) -> str | None:
        return "the mean of several clients' stand-ins cannot be solved" if case.clients > 1 else None

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        attack = replace(attack, objective=scale_free(attack.objective))
        shown = [self._solved(attack, each) for each in seen]
        shown = [each for each in shown if isinstance(each.update, Solved)] or list(seen)
        return labels_from_bias(attack, shown[0]), shown

    def view(self, view: View, seen: Observation) -> View:
        if isinstance(seen.update, Solved):
            return view
        view = replace(view, notes=(*view.notes, "moments unknown: soft signs are matched"))
        return mimicking(view, _SoftSigns(self.width))

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        if not isinstance(seen[0].update, Solved):
            return super().solve(attack, seen, rng=rng, progress=progress)
        best, lowest = None, math.inf
        for attempt in range(self.attempts):
            found, misfit = self._staged(attack, seen, rng=rng.child("attempt", attempt), progress=progress)
            if best is None or misfit < lowest:
                best, lowest = found, misfit
            if lowest < _FAILED:
                break
        assert best is not None
        return best

    def _staged(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> tuple[Reconstruction, float]:
        """The answer of one search in stages, and its misfit."""
        patience = attack.patience or (_PATIENCE if attack.optimizer.smooth else None)
        best, lowest = None, math.inf
        guess: Batch | None = None
        for stage, floor in enumerate(self.floors):
            begun = attack if guess is None else continued(attack, guess)
            weighed = replace(
                begun, matched=_Weighed(inner=attack.matched, floor=floor, guess=guess), patience=patience
            )
            weighed = replace(weighed, priors=self._priors(weighed, seen[0], guess))
            found = weighed.reconstruct(seen, rng=rng.child("stage", stage), progress=progress)
            guess = found.guess
            misfit = sum(_misfit(weighed.view(each), each, guess) for each in seen) / len(seen)
            # Where errors are larger than they should be, a lower floor must pay.
            if best is None or misfit <= (1.02 if misfit < _EXPLAINED else 0.9) * lowest:
                best = found if best is None else replace(found, first_loss=best.first_loss)
                lowest = min(misfit, lowest)
        assert best is not None
        return best, lowest

    def _priors(self, attack: Matching, seen: Observation, guess: Batch | None) -> tuple[tuple[float, Prior], ...]:
        """Those of the attack, with the total variation that the errors of the entries ask for.

        With errors s of entries with weights w the most likely image minimises 1 - cosine, plus the differences of
        pixels over the contrast, times the mean (w s)^2 over the squared length of the weighted update.
        """
        assert isinstance(seen.update, Solved)
        contrast = self.contrast or usual_contrast(seen)
        if self.contrast is None and seen.public_data is None and guess is not None:
            low, high = _CONTRASTS
            contrast = min(high, max(low, usual_contrast(replace(seen, public_data=guess))))
        view = attack.view(seen)
        noise, size, length = 0.0, 0, 0.0
        for name, weight in view.weights.items():
            blur = weight * seen.update.errors[name].to(weight)
            noise += float(blur[weight > 0].square().sum())
            size += int((weight > 0).sum())
            length += float((weight * view.target[name]).square().sum())
        pixels = seen.inputs.size * (seen.batch_size or 1)
        # The mean over maps of channels and of their differences counts each half.
        strength = 2 * noise / size * pixels / (length * contrast) if size and length else 0.0
        rest = [(own, prior) for own, prior in attack.priors if not isinstance(prior, TotalVariation)]
        return (*rest, (strength, TotalVariation(form="double_opponent")))

    @property
    def _defense(self) -> AdaDefense:
        assert isinstance(self.defense, AdaDefense)
        return self.defense

    def _solved(self, attack: Matching, seen: Observation) -> Observation:
        """The observation with the solutions behind its stand-in; as it is if the moments are unknown."""
        first = seen.earlier[0].seen if seen.earlier else seen
        scale = server_scale(first, self._defense)
        if scale is None:
            return seen
        moments = Moments()
        for each in seen.earlier:
            found = solved(each.seen.update, self._defense, moments, scale)
            view = attack.matched.view(each.seen, len(each.guess), torch.float64, needs_scale=False)
            moments = moments.after(*settled(found, update_of(view, each.guess)), self._defense)
        # The solution has removed the defense.
        return replace(seen, update=solved(seen.update, self._defense, moments, scale), defense=Defense())


@dataclass(frozen=True, kw_only=True)
class _Weighed(Around):
    """Match the solutions as `inner` does, each by its error; of two solutions the one that a guess is nearer to."""

    floor: float
    guess: Batch | None = None

    def changed(self, view: View, seen: Observation) -> View:
        assert isinstance(seen.update, Solved)
        unit = _unit(view, seen.update)
        exact = self.floor * _rms(view.target) / abs(unit) + torch.finfo(torch.float64).tiny
        chosen = _chosen(view, seen.update, self.guess)
        target = {name: (unit * value).to(view.precision) for name, (value, _, _) in chosen.items()}
        weights = {name: exact / (exact**2 + error.square()).sqrt() for name, (_, error, _) in chosen.items()}
        return weighing(replace(view, target=target), weights, "the stand-in is solved for the gradient")


def _chosen(view: View, update: Solved, guess: Batch | None) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """For each matched tensor the solutions, their errors, and the guess's values in the same unit."""
    if guess is None:
        return {name: (*nearest(update, name, None), None) for name in view.target}
    guessed = update_of(view, guess)
    factor = fitted_factor(update, guessed)
    near = {name: guessed[name].to(torch.float64) * factor for name in view.target}
    return {name: (*nearest(update, name, near[name]), near[name]) for name in view.target}


def _misfit(view: View, seen: Observation, guess: Batch) -> float:
    """How far the update of a guess is from the solutions: the mean of log(1 + z^2), with z in standard errors."""
    assert isinstance(seen.update, Solved)
    distances = []
    for value, error, near in _chosen(view, seen.update, guess).values():
        assert near is not None
        variance = error.square() + _ARITHMETIC**2 * value.square().mean() + torch.finfo(torch.float64).tiny
        distances.append(((value - near).square() / variance)[error.isfinite()])
    return float(torch.cat(distances).log1p().mean())


def _unit(view: View, update: Solved) -> float:
    """What the way of matching has multiplied the update by."""
    above = sum(float((tensor.double() * update.tensors[name]).sum()) for name, tensor in view.target.items())
    below = sum(float(update.tensors[name].square().sum()) for name in view.target)
    return above / below if above and below else 1.0


def _rms(tensors: Params) -> float:
    """The root mean square of all entries."""
    return float(torch.cat([tensor.flatten() for tensor in tensors.values()]).double().square().mean().sqrt())


def server_scale(seen: Observation, defense: AdaDefense) -> float | None:
    """The server's factor on the stand-in of a client's first round, 1 for what a client sends; None for another round.

    The sizes of a first stand-in are just below its limit. A factor is rounded up to three digits.
    """
    limit, _ = first_step(defense)
    sizes = torch.cat([tensor.flatten() for tensor in seen.update.tensors.values()]).abs().double() / limit
    sizes = sizes[sizes > 0]
    if not len(sizes):
        return None
    largest = float(sizes.max())
    digit = 10.0 ** (math.floor(math.log10(largest)) - 2)
    scale = 1.0 if 0.9 < largest < 1 + 1e-6 else math.ceil(largest / digit * (1 - 1e-6)) * digit
    return scale if float((sizes > 0.9 * scale).double().mean()) > 0.75 else None
