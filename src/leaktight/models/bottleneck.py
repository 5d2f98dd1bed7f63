"""PRECODE's variational bottleneck before the last linear layer of a network."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from leaktight.core.rng import Rng, drawn_like, global_seed
from leaktight.core.tasks import Penalised
from leaktight.models.surgery import final_linear


class VariationalBottleneck(nn.Module):
    """Encodes features (N, ..., F) as normal distributions, samples them, and decodes the samples to (N, ..., F).

    The noise is from the client's secret stream (`core.rng.secret_model`), in training and in evaluation.
    `take_divergence` returns the KL divergence of the distributions of the last call from N(0, 1): (N,), in bits.
    """

    def __init__(self, features: int, latent_size: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, 2 * latent_size)
        self.decoder = nn.Linear(latent_size, features)
        self._divergence: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        mean, raw = self.encoder(features).chunk(2, dim=-1)
        std = F.softplus(raw)
        each = -0.5 * (1 + 2 * std.log() - mean.square() - std.square())
        self._divergence = each.flatten(1).sum(1) / math.log(2)
        decoded: Tensor = self.decoder(mean + std * self.draw(std))
        return decoded

    def draw(self, like: Tensor) -> Tensor:
        """The noise of one forward pass."""
        return drawn_like(like)

    def take_divergence(self) -> Tensor:
        """The divergence of the last call. It is removed here, because it would keep its graph in memory."""
        divergence, self._divergence = self._divergence, None
        assert divergence is not None
        return divergence


class BottleneckedLinear(nn.Module):
    """A variational bottleneck and a linear layer."""

    def __init__(self, bottleneck: VariationalBottleneck, linear: nn.Linear) -> None:
        super().__init__()
        self.bottleneck = bottleneck
        self.linear = linear

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.linear(self.bottleneck(features))
        return outputs


def insert_bottleneck(model: nn.Module, latent_size: int, penalty_weight: float, *, rng: Rng) -> nn.Module:
    """Insert a bottleneck before the linear layer registered last, in place; the model then returns `Penalised`.

    The layer is then called `<name>.linear`.
    """
    name, linear = final_linear(model)
    with global_seed(rng):
        bottleneck = VariationalBottleneck(linear.in_features, latent_size).to(linear.weight)
    replaced = BottleneckedLinear(bottleneck, linear)
    if name:
        model.set_submodule(name, replaced)
    else:  # the model is that layer
        model = replaced
    model.register_forward_hook(_Penalise(name, penalty_weight))
    return model


@dataclass(frozen=True)
class _Penalise:
    """A forward hook that adds the divergence to the outputs; finds the layer by name, so that it works in copies."""

    layer: str
    weight: float

    def __call__(self, model: nn.Module, inputs: object, outputs: Tensor) -> Penalised:
        layer = model.get_submodule(self.layer)
        assert isinstance(layer, BottleneckedLinear)
        return Penalised(outputs, self.weight * layer.bottleneck.take_divergence())
