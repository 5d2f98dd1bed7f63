"""Soteria: prunes features in the gradient of the last linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leaktight.core.devices import for_float64
from leaktight.core.errors import LeaktightError, ModelError, require_at_least
from leaktight.core.inputs import ONLY_IMAGES, Inputs
from leaktight.core.protocols import ClientFacts, Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.text import sides
from leaktight.core.types import Params, State
from leaktight.defenses.perturbation import (
    below_percentile,
    require_finite,
    require_share,
    widened,
)
from leaktight.models.surgery import final_linear, layer_inputs

_CHUNK_ELEMENTS = 2**20
"""About the most numbers in the gradients of one chunk of features: 4 MB, and as much for each layer below."""


@dataclass(frozen=True, kw_only=True)
class Soteria(Defense):
    """Zeroes columns of the last linear layer's gradient: the features that depend least on the input for their size.

    prune_share: the share of features whose column becomes zero; the layer's bias and all other tensors stay exact.
    epsilon: >= 0, added to the feature in the denominator.

    The score of feature i is |sum over the batch of ||d r_i / d x|| / (r_i + epsilon)|, with r the input of the layer;
    scores below the percentile are pruned. A feature that is zero and constant has score zero. This takes one backward
    pass per feature and step.

    Reports fraction_zeroed, of the features.
    Reference: Sun et al., Soteria, CVPR 2021. Share: 0.5 in OUTPOST, 0.8 in LRP, 0.6 in the authors' code.
    Assumes: a model whose last linear layer takes one vector of features per example. The zero columns are visible and
    the gradients of convolutions are exact: an attacker ignores the layer.
    Differs from the paper: any such model, not only LeNet; the scores are the published code's approximation of
    ||r (d r / d x)^-1||. With batch normalisation in training mode d r_i is that of the whole batch; with dropout r is
    drawn again.
    """

    prune_share: float = 0.5
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        require_share(prune_share=self.prune_share)
        require_at_least(0, epsilon=self.epsilon)

    @property
    def takes(self) -> frozenset[type[Inputs]]:
        return ONLY_IMAGES  # it needs the derivative with respect to the input

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        final_linear(model)  # a model without one is an error before the first step
        return model, {}

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        if not self.prune_share:
            report("fraction_zeroed", 0.0)
            return step.gradient, state
        require_finite(step.gradient)
        layer, scores = feature_scores(step, self.epsilon)
        name = f"{layer}.weight" if layer else "weight"
        if name not in step.gradient:
            raise ModelError(f"expected a last linear layer that is trained, got {layer!r}, which is frozen")
        pruned = below_percentile(scores, self.prune_share)
        report("fraction_zeroed", float(for_float64(pruned).double().mean()))
        return {**step.gradient, name: step.gradient[name].masked_fill(pruned, 0)}, state


def feature_scores(step: Step, epsilon: float = 0.0) -> tuple[str, Tensor]:
    """The name of the linear layer that runs last, and the scores (features,) of its inputs."""
    inputs = step.batch.inputs.detach().requires_grad_()
    with torch.enable_grad():
        entered = layer_inputs(step.model, step.params, step.buffers, inputs, (nn.Linear,))
    if not entered:
        raise ModelError("expected a model that runs a linear layer, got none; choose a model that ends in nn.Linear")
    name, features = entered[-1]
    if features.ndim != 2:
        raise ModelError(
            f"expected one vector of features per example, (N, features), at the last linear layer {name!r}, "
            f"got {sides(features.shape)}; choose a model for whole images"
        )
    norms = _sensitivities(features, inputs)
    ratios = norms / (widened(features.detach().T) + epsilon)
    scores = torch.where(norms == 0, 0.0, ratios).sum(1).abs()
    if bool(scores.isnan().any()):
        raise LeaktightError("the features of the batch are not finite; lower local.learning_rate or check the data")
    return name, scores


def _sensitivities(features: Tensor, inputs: Tensor) -> Tensor:
    """||d r_i / d x_n|| (features, N): one backward pass per feature, several at a time."""
    size = features.shape[1]
    chunk = max(1, _CHUNK_ELEMENTS // max(inputs.numel(), features.numel()))
    rows = []
    for first in range(0, size, chunk):
        places = torch.arange(first, min(first + chunk, size))
        seeds = torch.zeros(len(places), *features.shape, dtype=features.dtype)
        seeds[torch.arange(len(places)), :, places] = 1
        (gradients,) = torch.autograd.grad(
            features, inputs, seeds.to(features.device), retain_graph=True, is_grads_batched=True
        )
        rows.append(widened(gradients.flatten(2)).norm(dim=2))
    return torch.cat(rows)
