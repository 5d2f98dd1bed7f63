"""Against AdaDefense: the stand-in of a client's first round is inverted; in later rounds soft signs are matched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leaktight.adaptive.knowing import Adaptation, labels_from_bias, mimicking, scale_free, weighing
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import View
from leaktight.core.errors import require_above
from leaktight.core.protocols import Defense, Report
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Params, State, Update
from leaktight.defenses.adadefense import CODE_SCALE, AdaDefense


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
    """AdaDefense: in a client's first round the stand-in is inverted in closed form and matched as the gradient it was.

    floor: the error of an entry beside that of rounding the stand-in, relative to the root mean square of the update,
    > 0; entries with a larger rounding error, which grows with the square of the entry, get a smaller weight.
    width: of the soft signs in later rounds, > 0.

    With moments of zero the stand-in is r = a g / (|g| + e), or a g / sqrt(g^2 + e), with a and e from the settings.
    A round counts as a client's first if it is the federation's first, or if the sizes of r are just below a, which
    happens only then. Labels that would be searched for are read from the last layer's bias, whose gradient is p - y.
    Assumes: nothing else. The inversion is as exact as the bits of r allow.
    Cannot: invert later rounds. The two moments of every entry are then two unknowns for one equation. What is left are
    signs and some information on sizes: the guess's update goes through a soft sign and is compared with the stand-in.
    """

    exact: ClassVar[bool] = True

    floor: float = 0.01
    width: float = 0.3

    def __post_init__(self) -> None:
        require_above(0, floor=self.floor, width=self.width)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        attack = labels_from_bias(replace(attack, objective=scale_free(attack.objective)), seen[0])
        return attack, [self._inverted(each) if self._first(each) else each for each in seen]

    def view(self, view: View, seen: Observation) -> View:
        if type(seen.defense) is not Defense:
            view = replace(view, notes=(*view.notes, "moments unknown: soft signs are matched"))
            return mimicking(view, _SoftSigns(self.width))
        weights = confidence(seen.update.tensors, self._defense, self.floor)
        return weighing(view, weights, "the stand-in of a first round is inverted")

    @property
    def _defense(self) -> AdaDefense:
        assert isinstance(self.defense, AdaDefense)
        return self.defense

    def _first(self, seen: Observation) -> bool:
        """Whether this update is the stand-in of a client's first round."""
        if seen.broadcast.round == 0:
            return True
        limit, _ = first_step(self._defense)
        sizes = torch.cat([tensor.flatten() for tensor in seen.update.tensors.values()]).abs()
        return float(sizes.max()) <= limit * (1 + 1e-6) and float(sizes.median()) > 0.9 * limit

    def _inverted(self, seen: Observation) -> Observation:
        tensors = {name: invert(tensor, self._defense) for name, tensor in seen.update.tensors.items()}
        # The inversion has removed the defense.
        return replace(seen, update=replace(seen.update, tensors=tensors), defense=Defense())


def first_step(defense: AdaDefense) -> tuple[float, float]:
    """a and e of a first stand-in: a g / (|g| + e), or a g / sqrt(g^2 + e) with epsilon inside the root."""
    if defense.variant == "paper":
        return 1.0, defense.epsilon
    root = math.sqrt(1 - defense.beta2)
    if defense.form == "adagrad":
        return CODE_SCALE * root, defense.epsilon
    return CODE_SCALE, defense.epsilon / root


def invert(stand_in: Tensor, defense: AdaDefense) -> Tensor:
    """The gradient behind the stand-in of a first round, in float64.

    Values that rounding has put at or beyond the limit count as the largest number below it.
    """
    limit, epsilon = first_step(defense)
    share = (stand_in.to(torch.float64) / limit).clamp(-1, 1)
    left = (1 - share.abs()).clamp(min=_rounding(stand_in))
    if defense.epsilon_inside:
        return share * math.sqrt(epsilon) / (left * (1 + share.abs())).sqrt()
    return epsilon * share / left


def confidence(gradient: Params, defense: AdaDefense, floor: float) -> dict[str, Tensor]:
    """The weight f / sqrt(f^2 + s^2) of every entry: s is its rounding error in float32, f is `floor` times the rms."""
    _, epsilon = first_step(defense)
    sizes = {name: tensor.abs() for name, tensor in gradient.items()}
    rms = torch.cat([size.flatten() for size in sizes.values()]).square().mean().sqrt()
    exact = floor * rms + torch.finfo(torch.float64).tiny
    rounding = _rounding(torch.zeros((), dtype=torch.float32))
    weights = {}
    for name, size in sizes.items():
        # ds = dr / |dr / dg|
        slope = (
            epsilon / (size.square() + epsilon) ** 1.5 if defense.epsilon_inside else epsilon / (size + epsilon) ** 2
        )
        weights[name] = exact / (exact.square() + (rounding / slope).square()).sqrt()
    return weights


def _rounding(like: Tensor) -> float:
    """Half the distance between 1 and the next smaller number."""
    return torch.finfo(like.dtype).eps / 4
