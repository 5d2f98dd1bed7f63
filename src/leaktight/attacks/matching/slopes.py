"""The derivatives of the loss by the logits of each example, solved for from the gradient of the last linear layer.

Of a trained network they decide which gradient an image has: a guess that the network is unsure of has others, however
close it is. With the observed ones in their place the search has only the images to find.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaktight.attacks.matching.view import View
from leaktight.core.errors import ModelError
from leaktight.core.protocols import Defense
from leaktight.core.tasks import Classification
from leaktight.models.surgery import final_linear

Slopes: TypeAlias = Literal["guessed", "observed"]

Floats: TypeAlias = NDArray[np.float64]

_STARTS = (0.9, 0.99, 0.6)  # the confidences that a solution is sought from
_FITS = 1e-3  # the largest relative residual of a solution
_ROUNDING = 2e-7  # of a confidence in float32


@dataclass(frozen=True)
class Sloped(Classification):
    """Outputs times given slopes (N, C), which take the place of the targets; its gradient has these slopes."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).sum(1)


def with_slopes(view: View, labels: Tensor | None, *, scaled: bool) -> View:
    """The view with the slopes of its examples, or the same view where they cannot be found or a defense changed them.

    labels: (N,), or None if they are searched for. scaled: make the largest slope 1, for a scale-free objective.
    Assumes: one local step, cross-entropy, a last linear layer with a bias, fewer examples than classes.
    """
    plain = type(view.trainer.defense) is Defense and type(view.trainer.task) is Classification
    if labels is None or not plain or view.unknowns or len(view.steps) > 1:
        return view
    try:
        name, _ = final_linear(view.trainer.model)
    except ModelError:
        return view
    names = f"{name}.weight", f"{name}.bias"
    if not all(each in view.target for each in names):
        return view
    factor = -1 / view.steps[0][1] if view.steps else 1.0
    gradients = [factor * view.target[each].double().cpu() for each in names]
    layer = [{**view.buffers, **view.params}[each].double().cpu() for each in names]
    slopes = slopes_of(gradients, layer, labels.cpu())
    if slopes is None:
        return view
    scale = float(slopes.abs().max()) if scaled else 1.0
    notes = (*view.notes, "the slopes of the loss are those that the last layer shows")
    trainer = replace(view.trainer, task=Sloped())
    return replace(view, trainer=trainer, slopes=(slopes / scale).to(view.device, view.precision), notes=notes)


def slopes_of(gradients: list[Tensor], layer: list[Tensor], labels: Tensor) -> Tensor | None:
    """The slopes (N, C): confidences minus one-hot labels. None if no examples explain the gradient of the layer.

    gradients: of the weight (C, D) and bias (C,), of the mean loss of N examples. layer: the weight and the bias.
    With fewer examples than classes the gradient of the weight has the examples' features as its row space. So N x N
    numbers are sought, whose confidences give the same gradient.
    """
    (weight_grad, bias_grad), (weight, bias) = ([each.numpy() for each in pair] for pair in (gradients, layer))
    system = _System(weight_grad, bias_grad, weight, bias, labels.numpy())
    if not system.scales.all() or not 0 < len(labels) < len(gradients[1]):
        return None
    if len(labels) == 1:
        only = gradients[1][None]
        return only if system.explains(only.numpy()) else None
    found = [slopes for start in system.starts() if (slopes := system.solve(start)) is not None]
    if not found:
        return None
    # Examples without a say can have any slopes that cancel; the solution with the least of them is taken.
    return torch.from_numpy(min(found, key=lambda slopes: float(np.abs(slopes).sum())))


def leading_slopes(gradients: list[Tensor], layer: list[Tensor], leading: int, number: int) -> tuple[Tensor, float]:
    """The slopes (K, C) of the K of `number` examples with the most say, and the relative residual that is left.

    All labels are tried, but for one example: the lowest gradient of the bias is at its label. gradients, layer: as for
    `slopes_of`.
    """
    (weight_grad, bias_grad), (weight, bias) = ([each.numpy() for each in pair] for pair in (gradients, layer))
    share = number / leading
    found = []
    for others in combinations_with_replacement(range(len(bias)), leading - 1):
        labels = np.array([bias_grad.argmin(), *others])
        system = _System(share * weight_grad, share * bias_grad, weight, bias, labels)
        found += [system.nearest(start) for start in system.starts()]
    slopes, left = min(found, key=lambda each: each[1])
    return torch.from_numpy(slopes), left


class _System:
    """The equations of the features z (N, N) in the row space of the gradient of the weight."""

    def __init__(
        self, weight_grad: Floats, bias_grad: Floats, weight: Floats, bias: Floats, labels: NDArray[np.int64]
    ) -> None:
        self.number = len(labels)
        basis = np.linalg.svd(weight_grad, full_matrices=False)[2][: self.number]
        self.weight_grad, self.bias_grad = weight_grad @ basis.T, bias_grad
        self.weight, self.bias, self.basis, self.full = weight @ basis.T, bias, basis, weight
        self.labels = labels
        self.one_hot = np.eye(len(bias))[self.labels]
        self.scales = np.array([np.linalg.norm(weight_grad), np.linalg.norm(bias_grad)])

    def confidences(self, features: Floats) -> Floats:
        logits = features @ self.weight.T + self.bias
        powers = np.exp(logits - logits.max(1, keepdims=True))
        result: Floats = powers / powers.sum(1, keepdims=True)
        return result

    def residuals(self, point: Floats) -> Floats:
        features = point.reshape(self.number, -1)
        slopes = (self.confidences(features) - self.one_hot) / self.number
        weights = (slopes.T @ features - self.weight_grad) / self.scales[0]
        return np.concatenate([weights.ravel(), (slopes.sum(0) - self.bias_grad) / self.scales[1]])

    def jacobian(self, point: Floats) -> Floats:
        features = point.reshape(self.number, -1)
        shares = self.confidences(features)
        slopes = (shares - self.one_hot) / self.number
        mean = (shares @ self.weight)[:, None]
        moved = shares[:, :, None] * (self.weight[None] - mean) / self.number  # (N, C, k)
        weights = np.einsum("nck,nj->cjnk", moved, features)
        places = np.arange(features.shape[1])
        weights[:, places, :, places] += slopes.T[None]
        rows = len(self.bias) * features.shape[1]
        biases = moved.transpose(1, 0, 2).reshape(len(self.bias), -1) / self.scales[1]
        return np.concatenate([weights.reshape(rows, -1) / self.scales[0], biases])

    def starts(self) -> Iterator[Floats]:
        """Features that point to the labels: the rows of the gradient, and directions of the weight by confidence."""
        rows = np.maximum(-(self.weight_grad @ self.basis)[self.labels], 0)
        yield rows / np.maximum(rows.mean(1, keepdims=True), 1e-30) * 0.5 @ self.basis.T
        towards = (self.full[self.labels] - self.full.mean(0)).clip(min=0) @ self.basis.T
        own = np.arange(self.number), self.labels
        for confidence in _STARTS:
            low, high = np.zeros((self.number, 1)), np.full((self.number, 1), 1e3)
            for _ in range(40):
                middle = (low + high) / 2
                under = self.confidences(middle * towards)[own][:, None] < confidence
                low, high = np.where(under, middle, low), np.where(under, high, middle)
            yield high * towards

    def solve(self, start: Floats) -> Floats | None:
        """The slopes of a solution, or None."""
        slopes, left = self.nearest(start)
        return _uncancelled(slopes) if left < _FITS else None

    def nearest(self, start: Floats) -> tuple[Floats, float]:
        """The slopes that a descent from a start ends at, and the relative residual."""
        from scipy.optimize import least_squares  # slow to import

        try:
            found = least_squares(self.residuals, start.ravel(), jac=self.jacobian, max_nfev=200)
        except np.linalg.LinAlgError:  # LAPACK's decomposition of a Jacobian need not converge
            return np.zeros_like(self.one_hot), math.inf
        return self.confidences(found.x.reshape(self.number, -1)) - self.one_hot, float(np.linalg.norm(found.fun))

    def explains(self, slopes: Floats) -> bool:
        """Whether the slopes of one example are those of the features that they imply."""
        features = slopes @ self.weight_grad / self.scales[1] ** 2
        left = np.linalg.norm(slopes.T @ features - self.weight_grad)
        implied = self.confidences(features) - self.one_hot
        return bool(
            left < _FITS * self.scales[0] and np.linalg.norm(implied - slopes) < 50 * _FITS * self.scales[1] + _ROUNDING
        )


def _uncancelled(slopes: Floats) -> Floats:
    """The slopes, with zeros for two examples that cancel: each has half of the other's label, on the same features."""
    left = slopes.copy()
    sizes = np.linalg.norm(slopes, axis=1)
    for one, other in combinations(range(len(slopes)), 2):
        if np.linalg.norm(left[one] + left[other]) < 10 * _FITS * sizes[one]:
            left[[one, other]] = 0
    return left
