"""GradDefense: noise on random slices of the gradient, sized by sensitivity; the server removes noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leaktight.core.devices import for_float64
from leaktight.core.errors import LeaktightError, require_at_least
from leaktight.core.inputs import ONLY_IMAGES, Inputs
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import unflattened
from leaktight.core.types import Batch, Params, State
from leaktight.defenses.perturbation import example_rows, require_finite, widened
from leaktight.models.source import require_choice

_ROWS_PER_COLUMN = 6
"""Q: the matrix of the compensation has about this many times more rows than columns."""


@dataclass(frozen=True, kw_only=True)
class GradDefense(Defense):
    """Adds noise to a random half of the gradient's slices, which are cut to be equally sensitive to the input.

    noise_std: sigma. num_slices, num_perturbed: the number of slices, and of those that get noise at a step.
    clip: also clip the chosen slices of each example's gradient to norm sigma before their mean, as OUTPOST ran it.
    root_samples: examples for the sensitivity. refresh: compute the slices again every "round" or every "step".
    compensation_scale: None, or the change of the server's parameters per unit of gradient; the server then removes
    directions of the change that look like noise. For FedSGD it is the server's learning rate; for local SGD without
    momentum learning_rate * sqrt(local steps), since variances add up.
    variant: "paper", or "code": the published server, which multiplies by n instead of dividing, subtracts column means
    first, and uses a divisor of the number of parameters as the number of rows.

    A layer's sensitivity is the mean norm of d(sum of its gradient) / dx. Slices are runs of the flattened gradient, in
    units of the greatest common divisor of the layers' sizes; each has at most 1 / num_slices of the sensitivity, and
    the last has the rest.

    Reports noise_std, fraction_noised, and clip_rate with `clip`.
    Reference: Wang et al., Protect Privacy from Gradient Leakage Attack in Federated Learning, INFOCOM 2022.
    Assumes: nothing. The slices without noise are exact. Under a softmax the gradient of the last layer sums to zero
    whatever the input, so that layer counts as insensitive: it is entirely in the last slice, and exact at every step
    that does not perturb this slice.
    Differs from the paper: the first examples of the client's own batch replace its root set of public examples, five
    of each class. Slices do not overlap, and noise is not seeded. The noise in a mean over n clients has variance
    scale^2 sigma^2 (perturbed / slices) / n; the matrix is padded with zeros.
    """

    noise_std: float = 0.01
    num_slices: int = 10
    num_perturbed: int = 5
    clip: bool = False
    root_samples: int = 16
    refresh: Literal["round", "step"] = "round"
    compensation_scale: float | None = None
    variant: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        require_at_least(0, noise_std=self.noise_std)
        require_at_least(
            1, num_slices=self.num_slices, num_perturbed=self.num_perturbed, root_samples=self.root_samples
        )
        if self.num_perturbed > self.num_slices:
            raise ValueError(
                f"expected num_perturbed <= num_slices, got {self.num_perturbed} > {self.num_slices} slices"
            )
        require_choice("refresh", self.refresh, ("round", "step"))
        require_choice("variant", self.variant, ("paper", "code"))
        if self.compensation_scale is not None:
            require_at_least(0, compensation_scale=self.compensation_scale)

    @property
    def takes(self) -> frozenset[type[Inputs]]:
        return ONLY_IMAGES  # it needs the derivative with respect to the input

    @property
    def needs_mean(self) -> str | None:
        if not self.compensation_scale or not self.noise_std:
            return None
        return "its compensation_scale removes noise of the size that it has in a mean over clients"

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        report("noise_std", self.noise_std)
        if not self.noise_std:
            return step.gradient, state
        require_finite(step.gradient)
        bounds: Sequence[int] = state.get("bounds", ())
        if not bounds or step.index == 0 or self.refresh == "step":
            sizes = [tensor.numel() for tensor in step.gradient.values()]
            bounds = slice_bounds(sizes, sensitivities(step, self.root_samples), self.num_slices)
            state = {**state, "bounds": list(bounds)}
        stream = rng.secret()
        chosen = stream.permutation(len(bounds) - 1)[: self.num_perturbed].sort().values.tolist()
        flat = torch.cat([widened(tensor.reshape(-1)) for tensor in step.gradient.values()])
        each = self._examples(step) if self.clip else None
        for place in chosen:
            part = slice(bounds[place], bounds[place + 1])
            if each is not None:
                flat[part] = self._clipped(each[:, part], report)
            flat[part] += self.noise_std * stream.normal_like({"": flat[part]})[""]
        report("fraction_noised", sum(bounds[place + 1] - bounds[place] for place in chosen) / len(flat))
        return unflattened(flat, step.gradient), state

    def on_aggregate(self, change: Params, num_clients: int, state: State) -> tuple[Params, State]:
        if not self.compensation_scale or not self.noise_std:
            return change, state
        share = self.num_perturbed / self.num_slices
        variance = self.compensation_scale**2 * share * self.noise_std**2
        variance = variance * num_clients if self.variant == "code" else variance / num_clients
        flat = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in change.values()])
        return unflattened(denoised(flat, variance, published=self.variant == "code"), change), state

    def _examples(self, step: Step) -> Tensor:
        each = step.per_example()
        require_finite(each)
        return torch.cat([widened(example_rows(each[name])) for name in step.gradient], 1)

    def _clipped(self, rows: Tensor, report: Report) -> Tensor:
        """The mean of the rows (N, size), each scaled down to norm sigma at most."""
        norms = rows.norm(dim=1, keepdim=True)
        report("clip_rate", float(for_float64(norms > self.noise_std).double().mean()))
        mean: Tensor = (rows / (norms / self.noise_std).clamp(min=1)).mean(0)
        return mean


def sensitivities(step: Step, num_samples: int) -> list[float]:
    """Of each parameter tensor: the mean over examples of the norm of d(sum of its gradient) / d(example)."""
    inputs = step.batch.inputs[:num_samples].detach().requires_grad_()
    leaves = {name: step.params[name].detach().requires_grad_() for name in step.gradient}
    with torch.enable_grad():
        # The sum of the losses, not the mean, so that each example's derivative is that of its own loss.
        loss = step.loss({**step.params, **leaves}, Batch(inputs, step.batch.targets[:num_samples])) * len(inputs)
        gradients = torch.autograd.grad(
            loss, tuple(leaves.values()), create_graph=True, allow_unused=True, materialize_grads=True
        )
    result = []
    for gradient in gradients:
        moved = None
        if gradient.requires_grad:
            (moved,) = torch.autograd.grad(gradient.sum(), inputs, retain_graph=True, allow_unused=True)
        result.append(0.0 if moved is None else float(moved.flatten(1).norm(dim=1).mean()))
    return result


def slice_bounds(sizes: Sequence[int], sensitivity: Sequence[float], num_slices: int) -> list[int]:
    """The first index of each slice of the flattened gradient, and the end of the last one.

    Few units give fewer slices than `num_slices`. If no layer is sensitive, all elements count equally.

    >>> slice_bounds([6, 4], [1.0, 3.0], 4)
    [0, 6, 8, 10]
    """
    total = math.fsum(sensitivity)
    if not math.isfinite(total):
        raise LeaktightError("the sensitivity of a layer is not finite; lower local.learning_rate or check the data")
    if not total:
        return slice_bounds(sizes, [float(size) for size in sizes], num_slices)
    unit, target = math.gcd(*sizes), total / num_slices
    bounds, place, filled = [0], 0, 0.0
    for size, of_layer in zip(sizes, sensitivity, strict=True):
        left = size // unit
        of_unit = of_layer / left if left else 0.0
        while left and len(bounds) < num_slices:
            room = max(0.0, target - filled) * (1 + 1e-9)  # rounding errors must not exclude a unit
            fitting = left if of_unit * left <= room else math.floor(room / of_unit)
            taken = min(left, max(fitting, 1 if place == bounds[-1] else 0))
            place, filled, left = place + taken * unit, filled + taken * of_unit, left - taken
            if left:
                bounds.append(place)
                filled = 0.0
    return [*bounds, sum(sizes)]


def denoised(flat: Tensor, variance: float, *, published: bool = False) -> Tensor:
    """The vector without the directions, as a tall matrix, that look like noise of this variance.

    Noise is where the eigenvalues of the covariance of the columns lie between variance (1 -+ sqrt(columns / rows))^2,
    the bounds for a random matrix (Marchenko and Pastur).
    """
    rows = _tall_divisor(len(flat)) if published else math.ceil(math.sqrt(_ROWS_PER_COLUMN * len(flat)))
    columns = math.ceil(len(flat) / rows)
    matrix = torch.nn.functional.pad(flat, (0, rows * columns - len(flat))).reshape(rows, columns)
    centred = matrix - matrix.mean(0) if published else matrix
    strengths, directions = torch.linalg.eigh(centred.T @ centred / max(1, rows - published))
    edge = math.sqrt(columns / rows)
    noise = (strengths > variance * (1 - edge) ** 2) & (strengths < variance * (1 + edge) ** 2)
    kept = directions[:, ~noise]
    cleaned: Tensor = matrix @ kept @ kept.T
    return cleaned.reshape(-1)[: len(flat)]


def _tall_divisor(count: int) -> int:
    """The smallest divisor of `count` that is at least sqrt(Q count), or `count` itself."""
    least = math.sqrt(_ROWS_PER_COLUMN * count)
    small = [divisor for divisor in range(1, math.isqrt(count) + 1) if count % divisor == 0]
    return min((count // divisor for divisor in small if count // divisor >= least), default=count)
