"""The privacy budget that a client has spent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spent:
    """The (epsilon, delta) of all messages of a client so far, against anyone who reads them, even if they know how
    examples were drawn."""

    epsilon: float
    delta: float


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon, without sampling, of a Gaussian mechanism whose sensitivity is mu times its noise.

    k uses of a mechanism with mu_1 have mu = sqrt(k) mu_1. Reference: Balle and Wang 2018, theorem 8; Dong et al. 2022.
    """

    def holds(epsilon: float) -> bool:
        ends = torch.tensor([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu], dtype=torch.float64)
        above, below = torch.special.log_ndtr(ends).tolist()
        return math.exp(above) - math.exp(epsilon + below) <= delta

    if not math.isfinite(mu):
        return math.inf
    if not mu or holds(0.0):
        return 0.0
    lower, upper = 0.0, 1.0
    while not holds(upper):
        lower, upper = upper, 2 * upper
    while lower < (middle := (lower + upper) / 2) < upper:
        lower, upper = (lower, middle) if holds(middle) else (middle, upper)
    return upper
