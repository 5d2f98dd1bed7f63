"""Clipping: a bound on the norm of gradients or updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from leaktight.core.devices import for_float64
from leaktight.core.protocols import Report, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import squared_norm
from leaktight.core.types import Params, State
from leaktight.defenses.perturbation import Perturbation, example_rows, require_finite, widened
from leaktight.models.source import require_choice

Scope: TypeAlias = Literal["global", "layer", "example"]


@dataclass(frozen=True, kw_only=True)
class Clipping(Perturbation):
    """Scales down whatever has a norm above `clip_norm`: the whole gradient, each tensor, or each example's gradient.

    scope: "global": the norm of all tensors together. "layer": of each tensor. "example": of each example's gradient,
    all tensors together, before the mean; only at steps, and not with batch normalisation in training mode.
    clip_norm: S > 0; g becomes g min(1, S / |g|). inf is no clipping.
    at: "step" or "update".

    Reports clip_rate, the share of gradients, tensors or examples whose norm was above clip_norm.
    Reference: clip_norm = 4 in Li et al., GGL, CVPR 2022, and Wan et al., LRP; by example in Abadi et al., CCS 2016.
    Assumes: nothing. Clipping alone changes no direction: "global" has no effect on a scale-free distance.
    Differs from the paper: no 1e-6 is added to the norm, so that a gradient within the bound is unchanged to the bit.
    """

    scope: Scope = "global"
    clip_norm: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("scope", self.scope, get_args(Scope))
        if not self.clip_norm > 0:
            raise ValueError(f"expected clip_norm > 0, got {self.clip_norm}")
        if self.scope == "example" and self.at == "update":
            raise ValueError(
                'expected at = "step" for scope "example", got "update": an update has no gradient of one example'
            )

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        if self.scope == "example":
            return self._clip_examples(step.gradient, step.per_example, report), state
        return super().on_gradient(step, state, rng=rng, report=report)

    def perturb(self, tensors: Params, *, rng: Rng, report: Report) -> Params:
        groups = [tensors] if self.scope == "global" else [{name: tensor} for name, tensor in tensors.items()]
        clipped: dict[str, Tensor] = {}
        too_long = 0
        for group in groups:
            norm = float(squared_norm(group.values()).sqrt())
            if norm > self.clip_norm:
                too_long += 1
                group = {name: tensor * (self.clip_norm / norm) for name, tensor in group.items()}
            clipped.update(group)
        report("clip_rate", too_long / len(groups))
        return clipped if too_long else tensors

    def _clip_examples(self, gradient: Params, per_example: Callable[[], Params], report: Report) -> Params:
        each = per_example()
        require_finite(each)
        squares = [example_rows(for_float64(rows).to(torch.float64)).square().sum(1) for rows in each.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        too_long = norms > self.clip_norm
        report("clip_rate", float(too_long.double().mean()))
        if not bool(too_long.any()):
            return gradient
        factors = torch.where(too_long, self.clip_norm / norms, 1.0)
        return {name: _weighted_mean(rows, factors).to(rows.dtype) for name, rows in each.items()}


def _weighted_mean(rows: Tensor, factors: Tensor) -> Tensor:
    """The mean of rows (N, *shape), each times its factor (N,). In half precision the result could exceed the bound."""
    wide = widened(rows)
    mean: Tensor = torch.tensordot(factors.to(wide), wide, 1) / len(factors)
    return mean
