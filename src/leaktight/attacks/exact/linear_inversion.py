"""Linear-layer inversion: the gradient of a row of weights is that of its bias times the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from leaktight.attacks.exact.analytic import Entrance, Gradient, answer, entrance, gradient_of, only
from leaktight.attacks.exact.first_layer import confirmed
from leaktight.core.errors import ModelError, UsageError, require_at_least
from leaktight.core.protocols import Attack, Progress
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Certificate, Observation, Reconstruction
from leaktight.models.surgery import final_linear

_PROOF = "one input explains all units"
_PROVEN = 0.999


@dataclass(frozen=True, kw_only=True)
class LinearInversion(Attack):
    """Linear-layer inversion: the first layer's weight gradient over its bias gradient, in closed form.

    One example: exact for every network whose first layer is linear with a bias. Several examples: only for a network
    of one linear layer and different labels. There the row of a label is mostly its own image.
    refinements: iterations that then solve for images and probabilities in turn, >= 0; the one with the smallest error
    is the answer.

    Reference: Phong et al. 2018; Geiping et al. 2020, proposition 3.1; labels as {i : gradient of bias i < 0}.
    Assumes: the number of examples; for a model change one local step of plain gradient descent, and for several
    examples its learning rate.
    Differs from published code: rows are weighted by their bias gradients (least squares) instead of averaged, so that
    rows without signal add no noise; the refinement is new.
    """

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE})

    refinements: int = 200

    def __post_init__(self) -> None:
        require_at_least(0, refinements=self.refinements)

    @property
    def searches(self) -> bool:
        return False

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        one = only(self, seen)
        require(one, *self.requires)
        first = entrance(one)
        gradient = gradient_of(one)
        if not isinstance(first.layer, nn.Linear) or first.layer.bias is None:
            raise ModelError(f"expected a linear layer with a bias first, got {first.name!r}; use rgap or a search")
        weight, bias = (gradient.needed(f"{first.name}.{part}") for part in ("weight", "bias"))
        if not bool(bias.any()):
            raise UsageError(f"expected a gradient of {first.name!r} other than zero, got zero; it says nothing")
        if one.batch_size == 1:
            inside = (bias @ weight / bias.square().sum())[None]
            loss = float((weight - bias[:, None] * inside).norm() / weight.norm())
            labels = _one_label(one, gradient)
        else:
            inside, labels, loss = self._several(one, first, gradient)
        if progress is not None:
            progress(0, loss, None)
        made = answer(first.pixels(inside), labels, loss, {"assumed": list(gradient.notes)})
        one_input = one.batch_size == 1 and int((bias != 0).sum()) > 1
        if not one_input:
            return made
        figure = min(1 - loss, confirmed(one, gradient, first.name, made.guess))
        return replace(made, certificate=Certificate(_PROOF, figure, _PROVEN))

    def _several(self, seen: Observation, first: Entrance, gradient: Gradient) -> tuple[Tensor, Tensor, float]:
        """The inputs of the only layer (N, F), the labels (N,), and the relative error of their gradient."""
        number = seen.batch_size or 0
        weight, bias = (gradient.needed(f"{first.name}.{part}") for part in ("weight", "bias"))
        if final_linear(seen.model)[0] != first.name:
            raise UsageError(
                f"expected one example, or a network of one linear layer, got {number} examples; use a search"
            )
        labels = bias.argsort()[:number].sort().values if seen.labels is None else seen.labels
        if len(labels.unique()) != number or bool((bias[labels] >= 0).any()):
            raise UsageError(f"expected {number} examples with no label twice, got some of one class; use a search")
        own = nn.functional.one_hot(labels, len(bias)).double()
        found = weight[labels] / bias[labels, None]
        best, lowest = found, float("inf")
        for _ in range(self.refinements + 1 if gradient.scaled else 1):
            logits = nn.functional.linear(
                found, *(seen.broadcast.params[f"{first.name}.{part}"].double() for part in ("weight", "bias"))
            )
            signal = (logits.softmax(1) - own).T / number
            error = float((signal @ found - weight).norm() / weight.norm())
            if error < lowest:
                best, lowest = found, error
            found = torch.linalg.pinv(signal) @ weight
        return best, labels, lowest


def _one_label(seen: Observation, gradient: Gradient) -> Tensor:
    """The class with the lowest bias gradient in the last layer; class 0 if there is no bias."""
    if seen.labels is not None:
        return seen.labels.clone()
    bias = gradient.tensors.get(f"{final_linear(seen.model)[0]}.bias")
    return torch.zeros(1, dtype=torch.long) if bias is None else bias.argmin().reshape(1)
