"""PRECODE's bottleneck solved from its own gradients: the features and the noise of every example of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from leaktight.core.rng import Rng
from leaktight.core.types import Params

Matrix: TypeAlias = NDArray[np.float64]

_STARTS = 24
_SPREADS = (0.3, 1.0, 3.0)  # of the first logits, in turn
_SOLVED = 1e-6  # the residual at which no further start is tried


class Solution(NamedTuple):
    """What the bottleneck made of the examples of one batch.

    features (N, F): its inputs. slopes (N, F): the gradient of the batch's loss by them.
    misfit: of the gradients that these give, relative to those observed.
    """

    features: Tensor
    slopes: Tensor
    misfit: float


@dataclass(frozen=True)
class Head:
    """The bottleneck and the last layer: weights and gradients by name ("encoder.weight"), in float64.

    penalty_weight: the factor on the divergence.

    A batch of N examples with errors D = (p - y) / N has the gradients D d of the last layer, (W_last^T D) b of the
    decoder and E r of the encoder. So the samples b are mixtures of the rows of the decoder's gradient, and the N x N
    coefficients are those that give the probabilities p of D again. E, by the means, is known from D but for the
    divergence; that gives the features r alike. With one example both are quotients of weight and bias.
    """

    weights: Params
    gradients: Params
    penalty_weight: float

    def solve(self, labels: Tensor, *, rng: Rng) -> Solution | None:
        """The examples with these labels (N,); None if there are too many: D has a rank below the number of classes."""
        if not len(labels) < min(self.weights["linear.weight"].shape[0], self.weights["decoder.weight"].shape[1]):
            return None
        samples = self._samples(labels, rng)
        features, inner = self._encoded(samples, labels)
        means, raw = F.linear(features, self.weights["encoder.weight"], self.weights["encoder.bias"]).chunk(2, 1)
        noise = (samples - means) / F.softplus(raw)
        misfit = _apart(self.gradients, self._gradients(features, noise, labels))
        return Solution(features, inner @ self.weights["encoder.weight"], misfit)

    def solve_one(self) -> Solution:
        """The same for a single example, in one step or several: features change little from one to the next."""
        inner, seen = self.gradients["encoder.bias"][None], self.gradients["encoder.weight"]
        features = inner @ seen / inner.square().sum()
        misfit = _apart({"encoder": seen}, {"encoder": inner.T @ features})
        return Solution(features, inner @ self.weights["encoder.weight"], misfit)

    def _samples(self, labels: Tensor, rng: Rng) -> Tensor:
        """The samples b (N, K)."""
        number, last = len(labels), self.weights["linear.weight"]
        seen = torch.linalg.lstsq(last.T, self.gradients["decoder.weight"]).solution.numpy()  # D b
        rows = np.linalg.svd(seen, full_matrices=False)[2][:number]
        reduced, bias = seen @ rows.T, self.gradients["linear.bias"].numpy()
        slope = rows @ (last @ self.weights["decoder.weight"]).T.numpy()
        offset = (last @ self.weights["decoder.bias"] + self.weights["linear.bias"]).numpy()
        chosen = np.eye(len(offset))[labels.numpy()]

        def residual(mixing: Matrix) -> list[Matrix]:
            errors = _errors(mixing @ slope + offset, chosen)
            return [_relative(errors @ mixing, reduced), _relative(errors.sum(1), bias)]

        usual = np.log(np.clip(bias + chosen.mean(0), 1e-9, None))
        generator = rng.public_numpy()

        def start(place: int) -> Matrix:
            spread = _SPREADS[place % len(_SPREADS)] if number > 1 else 0.0
            logits = usual + spread * generator.standard_normal((number, len(usual)))
            return _quotient(_errors(logits, chosen), reduced)

        return torch.from_numpy(_least(residual, start, starts=_STARTS) @ rows)

    def _encoded(self, samples: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, F), and the gradient by the encoder's outputs (N, 2 K)."""
        number, latent = samples.shape
        known = self._by_samples(samples, labels).T.numpy()
        seen = self.gradients["encoder.weight"].numpy()
        rows = np.linalg.svd(seen, full_matrices=False)[2][:number]
        reduced, bias = seen @ rows.T, self.gradients["encoder.bias"].numpy()[:latent]
        slope = self.weights["encoder.weight"].numpy()[:latent] @ rows.T
        offset = self.weights["encoder.bias"].numpy()[:latent, None]
        factor = self.penalty_weight / math.log(2) / number

        def residual(mixing: Matrix) -> list[Matrix]:
            by_means = known + factor * (slope @ mixing.T + offset)
            return [_relative(by_means @ mixing, reduced[:latent]), _relative(by_means.sum(1), bias)]

        mixing = _least(residual, lambda _: _quotient(known, reduced[:latent]), starts=1)
        return torch.from_numpy(mixing @ rows), torch.from_numpy(_quotient(mixing.T, reduced.T))

    def _by_samples(self, samples: Tensor, labels: Tensor) -> Tensor:
        """The gradient of the batch's cross-entropy by the samples (N, K)."""
        weights, sought = self.weights, samples.clone().requires_grad_()
        with torch.enable_grad():
            decoded = F.linear(sought, weights["decoder.weight"], weights["decoder.bias"])
            logits = F.linear(decoded, weights["linear.weight"], weights["linear.bias"])
            (slope,) = torch.autograd.grad(F.cross_entropy(logits, labels), sought)
        return slope

    def _gradients(self, features: Tensor, noise: Tensor, labels: Tensor) -> Params:
        """The gradients that these features, with this noise, give."""
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in self.weights.items()}
        with torch.enable_grad():
            means, raw = F.linear(features, leaves["encoder.weight"], leaves["encoder.bias"]).chunk(2, 1)
            std = F.softplus(raw)
            divergence = -0.5 * (1 + 2 * std.log() - means.square() - std.square()).sum(1) / math.log(2)
            decoded = F.linear(means + std * noise, leaves["decoder.weight"], leaves["decoder.bias"])
            logits = F.linear(decoded, leaves["linear.weight"], leaves["linear.bias"])
            loss = F.cross_entropy(logits, labels) + self.penalty_weight * divergence.mean()
            return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def _least(residual: Callable[[Matrix], list[Matrix]], start: Callable[[int], Matrix], *, starts: int) -> Matrix:
    """The square matrix with the smallest residual, from several starts; the first that solves the equations."""
    from scipy.optimize import least_squares  # slow to import

    best, least = start(0), math.inf
    for place in range(starts):
        first = start(place)
        try:
            found = least_squares(
                lambda flat, shape=first.shape: np.concatenate(
                    [part.ravel() for part in residual(flat.reshape(shape))]
                ),
                first.ravel(),
                x_scale="jac",
                max_nfev=60,
            )
        except np.linalg.LinAlgError:  # LAPACK's decomposition of a Jacobian need not converge
            continue
        if found.cost < least:
            best, least = np.asarray(found.x, dtype=np.float64).reshape(first.shape), float(found.cost)
        if math.sqrt(2 * least) < _SOLVED:
            break
    return best


def _errors(logits: Matrix, chosen: Matrix) -> Matrix:
    """(p - y) / N, as columns (C, N)."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    errors: Matrix = (powers / powers.sum(1, keepdims=True) - chosen).T / len(chosen)
    return errors


def _quotient(left: Matrix, product: Matrix) -> Matrix:
    """The right factor of a product of matrices, given the left one."""
    return np.asarray(np.linalg.lstsq(left, product, rcond=None)[0], dtype=np.float64)


def _relative(guess: Matrix, truth: Matrix) -> Matrix:
    return (guess - truth) / max(float(np.linalg.norm(truth)), 1e-300)


def _apart(seen: Params, guess: Params) -> float:
    """The largest distance of two tensors of the same name, relative to the size of the observed one."""
    return max(float((guess[name] - seen[name]).norm() / seen[name].norm().clamp(min=1e-300)) for name in seen)
