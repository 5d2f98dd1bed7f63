"""What an attacker can say about its own guesses, so that several attacks can be compared without the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leaktight.adaptive.stages import update_of
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import Cosine
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.view import OneBatch, Simulation
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.faults import raise_fault
from leaktight.core.types import Batch, Observation, Reconstruction

_COSINE = Cosine()

EXPLAINED = 1e-10
"""The largest residual of a guess that explains an update up to rounding."""

_ROUNDING = 1e-14  # residuals below this are rounding alone
_CONTRAST = 0.1  # the mean difference of neighbouring pixels in photographs


@dataclass(frozen=True)
class Candidate:
    """A guess and its evidence.

    residual: 1 - cosine of the update and that of the guess, as far as the attacker knows how the update was made;
    infinite if it cannot be computed. entries: the number of entries that were compared. knows: whether the attack
    knows the defense.
    """

    name: str
    found: Reconstruction
    residual: float
    entries: int
    knows: bool = False

    @property
    def certified(self) -> bool:
        certificate = self.found.certificate
        return certificate is not None and certificate.holds and _finite(self.found.guess)

    def settled(self, enough: float) -> bool:
        """Whether no other attack has to be tried: the guess is proven, or its residual is at most `enough`."""
        return self.certified or self.residual <= enough

    @property
    def surprise(self) -> float:
        """Minus the logarithm of the probability of update and guess, up to a constant.

        The update is that of the guess with Gaussian errors of unknown size, (entries / 2) log(residual); differences
        of neighbouring pixels have a Laplace distribution.
        """
        inputs = self.found.guess.inputs
        rough = inputs.numel() * roughness(inputs) / _CONTRAST
        return self.entries / 2 * math.log(max(self.residual, _ROUNDING)) + rough

    @property
    def rank(self) -> tuple[bool, bool, bool, bool, float]:
        """Smaller is better: proven guesses, then those of attacks that know the defense, then by surprise.

        Guesses without a residual come after those that have one, and those that are not finite last.
        """
        unknown = not math.isfinite(self.residual)
        return not self.certified, not _finite(self.found.guess), unknown, not self.knows, self.surprise


def weigh(name: str, found: Reconstruction, seen: Sequence[Observation], *, knows: bool = False) -> Candidate:
    """The guess of an attack with its evidence. seen: all that was seen, the same for every guess that is compared.

    An attack that knows the defense has compared the update with what the defense makes of its guess; only it can.
    Of more guesses than the update has examples the first are kept, as the judge does; a proof knows their number.
    """
    proven = found.certificate is not None and found.certificate.holds
    found = replace(found, guess=_cut(found.guess, None if proven else seen[0].batch_size))
    entries = sum(int((tensor != 0).sum()) for each in seen for tensor in each.update.tensors.values())
    distance = float(found.notes["distance"]) if knows else residual(found, seen)
    return Candidate(name, found, distance if math.isfinite(distance) else math.inf, entries, knows)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the best evidence; the first of equal ones."""
    return min(candidates, key=lambda each: each.rank)


def residual(found: Reconstruction, seen: Sequence[Observation]) -> float:
    """The mean over what was seen of 1 - cosine between an update and that of the guess; infinite if unknown."""
    guess = found.guess
    if not _finite(guess):
        return math.inf
    try:
        distances = [_distance(guess, each) for each in seen]
    except LeaktightError as error:  # a guess of other labels or of another number of examples than the update has
        raise_fault(error)
        return math.inf
    return sum(distances) / len(distances) if all(map(math.isfinite, distances)) else math.inf


def _distance(guess: Batch, seen: Observation) -> float:
    attack = Matching(
        objective=_COSINE, matched=OneBatch() if seen.num_steps is None else Simulation(), precision="float64"
    )
    view = attack.view(replace(seen, batch_size=len(guess)))
    update = update_of(view, guess)
    prepared = _COSINE.prepare(view.target, view.trainer.model, seen.inputs.shape)
    return float(_COSINE.loss(update, prepared))


def _finite(guess: Batch) -> bool:
    return bool(torch.isfinite(guess.inputs).all())


def _cut(guess: Batch, number: int | None) -> Batch:
    if not len(guess):
        raise UsageError("expected at least one guess, got none")
    return guess if number is None else Batch(guess.inputs[:number], guess.targets[:number])


def roughness(inputs: Tensor) -> float:
    """The mean absolute difference of neighbouring pixels; 0 for inputs that are no images."""
    shown = inputs.ndim == 4 and min(inputs.shape[2:]) > 1
    return float(TotalVariation().penalty(inputs)) if shown and bool(torch.isfinite(inputs).all()) else 0.0
