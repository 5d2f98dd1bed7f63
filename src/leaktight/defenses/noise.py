"""Additive noise on gradients or updates, without differential privacy: their norm is not bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from leaktight.core.errors import require_at_least
from leaktight.core.protocols import Report
from leaktight.core.rng import Rng
from leaktight.core.secret import SecretStream
from leaktight.core.types import Params
from leaktight.defenses.perturbation import Perturbation
from leaktight.models.source import require_choice

_DRAWS: Mapping[str, Callable[[SecretStream, Params], Params]] = {
    "gaussian": SecretStream.normal_like,
    "laplace": SecretStream.laplace_like,
}
"""Functions that draw noise of mean 0 and variance 1, by distribution."""


@dataclass(frozen=True, kw_only=True)
class AdditiveNoise(Perturbation):
    """Adds independent Gaussian or Laplace noise to every element, at each local step or once to the update.

    distribution: "gaussian" or "laplace". noise_std: its standard deviation, for both. A published Laplace "scale" b
    has standard deviation sqrt(2) b: Plato's b = 0.1 (there called epsilon) is noise_std = 0.1414.
    at: "step" adds it to the gradient of every local step, "update" once to the update.

    Reports noise_std.
    Reference: Zhu et al., DLG, NeurIPS 2019; noise_std = 0.1 in Li et al., GGL, CVPR 2022, and Wan et al., LRP.
    Assumes: nothing. Gradients are not bounded, so there is no (epsilon, delta); for that use DP-SGD. An attacker who
    sees many rounds of the same examples averages the noise away.
    Differs from the paper: noise is fresh at every call, from the client's own random stream.
    """

    distribution: Literal["gaussian", "laplace"] = "gaussian"
    noise_std: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("distribution", self.distribution, _DRAWS)
        require_at_least(0, noise_std=self.noise_std)

    def perturb(self, tensors: Params, *, rng: Rng, report: Report) -> Params:
        report("noise_std", self.noise_std)
        if not self.noise_std:
            return tensors
        noise = _DRAWS[self.distribution](rng.secret(), tensors)
        return {name: tensor + self.noise_std * noise[name] for name, tensor in tensors.items()}
