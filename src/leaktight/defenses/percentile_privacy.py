"""Percentile privacy, as in NVFlare: the smallest entries of an update are dropped and the largest are cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leaktight.core.devices import for_float64
from leaktight.core.errors import require_above
from leaktight.core.protocols import Defense, Report, RoundPlan
from leaktight.core.rng import Rng
from leaktight.core.types import State, Update
from leaktight.defenses.perturbation import below_percentile, require_finite


@dataclass(frozen=True, kw_only=True)
class PercentilePrivacy(Defense):
    """Sets the smallest entries of an update to zero, of all tensors together, and cuts the rest to [-gamma, gamma].

    percentile: in [0, 100]; entries whose magnitude is below this percentile become zero. 10 drops a tenth.
    gamma: > 0; the largest magnitude that is sent.
    per_step: whether both are applied to the update divided by the number of local steps, which is then multiplied
    back, so that an entry is at most gamma times the number of steps. NVFlare does so if the client reports its steps.

    Reports fraction_zeroed, and clip_rate, the share of entries that were cut.
    Reference: NVFlare 2.9, `PercentilePrivacy(percentile=10, gamma=0.01)`, after Shokri and Shmatikov, CCS 2015.
    Assumes: nothing. There is no noise, so it is not differential privacy. What was not cut is visible and exact; what
    was cut or dropped is known to lie beyond or below a bound, with its sign.
    Differs from NVFlare: a gradient (FedSGD) is filtered as it is; there only model changes are. Scalars are sent as
    they are there too. Buffers are not filtered here.
    """

    percentile: float = 10.0
    gamma: float = 0.01
    per_step: bool = True

    def __post_init__(self) -> None:
        require_above(0, gamma=self.gamma)
        if not 0 <= self.percentile <= 100:
            raise ValueError(f"expected percentile in [0, 100], got {self.percentile}")

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        return plan, {**state, "steps": len(plan.learning_rates)}

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        require_finite(update.tensors)
        bound = self.bound(state["steps"] if update.kind == "delta" else 1)
        sizes = [tensor.numel() for tensor in update.tensors.values()]
        everything = torch.cat([tensor.detach().reshape(-1) for tensor in update.tensors.values()]).abs()
        small = below_percentile(everything, self.percentile / 100)
        masks = zip(update.tensors.items(), small.split(sizes), strict=True)
        sent = {name: _filtered(tensor, mask.view_as(tensor), bound) for (name, tensor), mask in masks}
        report("fraction_zeroed", float(for_float64(small).double().mean()))
        report("clip_rate", float(for_float64(everything > bound).double().mean()))
        return replace(update, tensors=sent), state

    def bound(self, steps: int) -> float:
        """The largest magnitude in an update of so many local steps."""
        return self.gamma * steps if self.per_step else self.gamma


def _filtered(tensor: Tensor, small: Tensor, bound: float) -> Tensor:
    return tensor if not tensor.ndim else tensor.masked_fill(small, 0).clamp(-bound, bound)
