"""Adaptive learning-rate perturbation: clients with more classes use larger learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leaktight.core.errors import require_at_least
from leaktight.core.protocols import ClientFacts
from leaktight.core.types import State
from leaktight.defenses.lrp import Lrp


@dataclass(frozen=True, kw_only=True)
class AdaLrp(Lrp):
    """LRP with rates from U(0, 2 K p_k N eta), where K grows with the number of classes that a client holds.

    zeta, beta, min_factor: K = zeta (|Y_k| - mean of |Y|) + beta, at least min_factor. The paper sets beta = 1, which
    keeps the mean of K over the clients at 1, and zeta = 1/6, 1/10, 1/20, 1/400 for MNIST, CIFAR-10, CIFAR-100
    and ImageNet.
    spread: as in LRP.

    Reference: Wan et al. 2023, Algorithm 1 (blue parts), equations 12 and 13.
    Assumes: as LRP; server and clients also learn the sum of the clients' numbers of classes.
    Differs from the paper: as LRP; and K is clamped, because with few classes at one client and many at most others
    it would be negative, and the client would increase its loss.
    """

    zeta: float = 1 / 6
    beta: float = 1.0
    min_factor: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, zeta=self.zeta)
        for name in ("beta", "min_factor"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")

    def counts(self, facts: ClientFacts) -> Mapping[str, int]:
        return {**super().counts(facts), "classes": facts.num_classes}

    def rate_factor(self, state: State) -> float:
        above_mean = state["own"]["classes"] - state["sums"]["classes"] / state["clients"]
        return super().rate_factor(state) * float(max(self.zeta * above_mean + self.beta, self.min_factor))
