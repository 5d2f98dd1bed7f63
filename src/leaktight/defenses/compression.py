"""Gradient compression: only the largest entries are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from leaktight.core.protocols import Report
from leaktight.core.rng import Rng
from leaktight.core.types import Params
from leaktight.defenses.perturbation import Perturbation, below_percentile, require_share
from leaktight.models.source import require_choice

Scope: TypeAlias = Literal["tensor", "global"]


@dataclass(frozen=True, kw_only=True)
class GradientCompression(Perturbation):
    """Sets the smallest entries to zero (GC): a share of each tensor, or of all tensors together.

    prune_share: p in [0, 1]; entries below the p-percentile of the magnitudes become zero: of n different magnitudes,
    the ceil(p (n - 1)) smallest. 0 is no compression; the largest entry is always kept.
    scope: "tensor" takes the percentile of each tensor, "global" one of all tensors.
    at: "step" or "update".

    Reports fraction_zeroed, the share of entries that are zero afterwards.
    Reference: Zhu et al., DLG, NeurIPS 2019; Lin et al., Deep Gradient Compression, ICLR 2018. 0.8 in Plato, 0.9 in
    LRP.
    Assumes: nothing. The kept entries are visible and exact: an attacker matches on them alone.
    Differs from the paper: pruned entries are dropped, as in the leakage studies; DGC adds them to later rounds.
    """

    prune_share: float = 0.8
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share(prune_share=self.prune_share)
        require_choice("scope", self.scope, get_args(Scope))

    def perturb(self, tensors: Params, *, rng: Rng, report: Report) -> Params:
        magnitudes = {name: tensor.abs() for name, tensor in tensors.items()}
        if not self.prune_share:
            kept = tensors
        elif self.scope == "tensor":
            kept = {
                name: tensor.masked_fill(below_percentile(magnitudes[name], self.prune_share), 0)
                for name, tensor in tensors.items()
            }
        else:
            everything = torch.cat([each.reshape(-1) for each in magnitudes.values()])
            small = below_percentile(everything, self.prune_share).split([each.numel() for each in magnitudes.values()])
            kept = {
                name: tensor.masked_fill(mask.view_as(tensor), 0)
                for (name, tensor), mask in zip(tensors.items(), small, strict=True)
            }
        total = sum(tensor.numel() for tensor in kept.values())
        report("fraction_zeroed", 1 - sum(int(tensor.count_nonzero()) for tensor in kept.values()) / total)
        return kept
