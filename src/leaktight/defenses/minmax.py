"""MinMax sampling: a few random entries are sent, larger ones with higher probability."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leaktight.core.protocols import Report
from leaktight.core.rng import Rng
from leaktight.core.secret import SecretStream
from leaktight.core.tensors import unflattened
from leaktight.core.types import Params
from leaktight.defenses.perturbation import At, Perturbation


@dataclass(frozen=True, kw_only=True)
class MinMaxSampling(Perturbation):
    """Keeps a random few entries, an entry g with probability g^2 / (g^2 + C), and sets the rest to zero (MMS, UGS).

    keep_share: k / n in (0, 1], the share that is kept: the k largest of (1/u - 1) g^2, with u uniform on (0, 1) for
    every entry. C is the largest value that is not kept. 1 keeps everything.
    unbiased: send g / p = g + C / g instead of g, with p the probability above; the mean over u is then g.
    at: "step" or "update" (the default, as published).

    Reports fraction_kept and threshold (C).
    Reference: Zhao et al., MinMax Sampling, SIGMOD 2022; attacked as unbiased sampling, with 5 %, by Yang et al.
    (GLAUS), TKDE 2023.
    Assumes: nothing. The kept indices are visible: over many rounds their frequency reveals the magnitudes.
    Differs from the paper: entries of all tensors compete together; the code of GLAUS models indices and signs only.
    """

    at: At = "update"
    keep_share: float = 0.05
    unbiased: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.keep_share <= 1:
            raise ValueError(f"expected keep_share in (0, 1], got {self.keep_share}")

    def perturb(self, tensors: Params, *, rng: Rng, report: Report) -> Params:
        flat = torch.cat([tensor.detach().reshape(-1).cpu().double() for tensor in tensors.values()])
        count = max(1, math.ceil(round(self.keep_share * len(flat), 9)))
        report("fraction_kept", count / len(flat))
        if count == len(flat):
            report("threshold", 0.0)
            return tensors
        kept, threshold = sample(flat, count, rng.secret())
        report("threshold", threshold)
        sent = torch.zeros_like(flat)
        sent[kept] = flat[kept]
        if self.unbiased:
            # A zero is kept only if fewer than `count` entries are not zero; it stays zero.
            sent[kept] += torch.where(flat[kept] == 0, 0.0, threshold / flat[kept])
        return unflattened(sent, tensors)


def sample(flat: Tensor, count: int, stream: SecretStream) -> tuple[Tensor, float]:
    """The indices of the `count` kept entries, and C, the largest weight of the others.

    An entry is kept as if C were fixed: of the other entries, exactly `count` - 1 are above it.
    """
    uniform = 1 - torch.from_numpy(stream.uniform(len(flat)))  # in (0, 1], never 0
    weights, order = ((1 / uniform - 1) * flat.square()).topk(count + 1)
    return order[:count], float(weights[count])
