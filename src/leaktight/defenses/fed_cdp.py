"""Fed-CDP: DP-SGD with clipping per layer, at a norm that is fixed or decays over the rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from leaktight.core.errors import require_at_least
from leaktight.defenses.dp_sgd import DpSgd


@dataclass(frozen=True, kw_only=True)
class FedCdp(DpSgd):
    """Clips the gradient of each example layer by layer, to a norm that may decay over the rounds, and adds noise.

    clip_norm: the largest norm of one example's gradient in each layer, in the first round.
    final_clip_norm, decay_rounds: the norm after so many rounds, reached linearly; None keeps clip_norm.
    noise_multiplier: standard deviation of the noise on the sum, as a multiple of the round's clipping norm.
    layers: a layer is a "tensor", or all tensors of a "module" (weight and bias).
    delta, accountant and reports: as in `dp_sgd`.

    An example can change each of L layers by the clipping norm, and so the whole gradient by sqrt(L) times it: the
    accountant gets noise_multiplier / sqrt(L). This is the same in every round, because noise and norm decay together.

    Reference: Wei et al. 2021 (Fed-CDP, and Fed-CDP(decay)).
    Assumes: as `dp_sgd`.
    Differs from the paper: epsilon is that of each client's own data and of what the server sees of it, with the
    sampling rate inside the client; the published accounting samples from the data of all clients, and counts
    noise_multiplier without the factor 1 / sqrt(L). The linear decay is our choice. The published training code has
    the noise commented out and divides the sum over 100 clients by 99.
    """

    clip_norm: float = 4.0
    noise_multiplier: float = 6.0
    final_clip_norm: float | None = None
    decay_rounds: int = 100
    layers: Literal["tensor", "module"] = "tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final_clip_norm is not None and not 0 < self.final_clip_norm <= self.clip_norm < math.inf:
            raise ValueError(
                f"expected 0 < final_clip_norm <= clip_norm < inf, got {self.final_clip_norm} and {self.clip_norm}"
            )
        require_at_least(1, decay_rounds=self.decay_rounds)

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        if self.layers == "tensor":
            return [[name] for name in names]
        modules: dict[str, list[str]] = {}
        for name in names:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        return list(modules.values())

    def clip_norm_in(self, round_index: int) -> float:
        if self.final_clip_norm is None:
            return self.clip_norm
        passed = min(round_index / self.decay_rounds, 1.0)
        return self.clip_norm + (self.final_clip_norm - self.clip_norm) * passed
