"""PRECODE: a variational bottleneck that adds noise between the features and the last layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from leaktight.core.errors import ModelError, require_at_least
from leaktight.core.protocols import ClientFacts, Defense
from leaktight.core.rng import Rng
from leaktight.core.types import State
from leaktight.models.bottleneck import VariationalBottleneck, insert_bottleneck


@dataclass(frozen=True, kw_only=True)
class Precode(Defense):
    """PRECODE: a variational bottleneck before the last linear layer makes gradients random (Scheliga et al. 2022).

    latent_size: K, the random numbers per example; the encoder computes a mean and a deviation for each.
    penalty_weight: beta, the factor on the KL divergence (in bits) from N(0, 1) in the loss.

    The bottleneck is part of the shared network: its gradients are sent, and the server sets its initial weights. Only
    the noise is private. It is drawn in evaluation too.
    Reference: Scheliga, Mäder and Seeland, PRECODE, WACV 2022; github.com/dAI-SY-Group/PRECODE.
    Assumes: the last linear layer is registered last.
    Differs from the paper: nothing known; deviations are a softplus and the divergence is in bits, as in the code.
    """

    latent_size: int = 256
    penalty_weight: float = 1e-3

    def __post_init__(self) -> None:
        require_at_least(1, latent_size=self.latent_size)
        require_at_least(0, penalty_weight=self.penalty_weight)

    def prepare(self, model: nn.Module, *, rng: Rng) -> nn.Module:
        return insert_bottleneck(model, self.latent_size, self.penalty_weight, rng=rng)

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        if not any(isinstance(module, VariationalBottleneck) for module in model.modules()):
            raise ModelError(
                "expected a model with PRECODE's bottleneck, got one without; let the defense prepare the model that "
                "server and clients share"
            )
        return model, {}
