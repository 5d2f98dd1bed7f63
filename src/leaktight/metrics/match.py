"""Matching of guesses to truths: once per batch, by one cost, before any metric is computed.

An update does not contain the order of a batch, so neither can a guess. A new matching for every metric, or several
guesses for one truth, would overrate the attack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.inputs import GREY
from leaktight.core.protocols import Metric
from leaktight.core.text import sides
from leaktight.metrics.image import as_images

Cost = Callable[[Tensor, Tensor], Tensor]
"""Maps guesses (G, C, H, W) and truths (T, C, H, W) to the cost (G, T) of each pair."""

NO_GUESS = -1
_SIGN = {"low": 1.0, "high": -1.0}


def mse_cost(guess: Tensor, truth: Tensor) -> Tensor:
    """The MSE of every pair after clamping to [0, 1]: (G, T)."""
    guess, truth = as_images(guess).flatten(1), as_images(truth).flatten(1)
    squares = guess.square().sum(1, keepdim=True) + truth.square().sum(1) - 2 * guess @ truth.T
    return squares.clamp_min(0) / guess.shape[1]


def pairwise(metric: Metric) -> Cost:
    """A metric as a cost: its score of every pair, negated if high scores leak. Takes G x T evaluations."""

    def cost(guess: Tensor, truth: Tensor) -> Tensor:
        rows = [metric(one.expand_as(truth), truth) for one in guess.unsqueeze(1)]
        return _SIGN[metric.leaks_when] * torch.stack(rows)

    return cost


_COSTS: dict[str, Cost] = {"mse": mse_cost}


def match(guess: Tensor, truth: Tensor, cost: Literal["mse"] | Cost = "mse") -> Tensor:
    """The index of the guess of each truth (T,), for the smallest total cost; -1 for a truth without a guess.

    No guess has two truths. With fewer guesses than truths some truths have none; with more, the worst guesses are
    dropped, so compare attacks with equal numbers of guesses. A pair whose cost is not finite is matched only if no
    other is left.
    """
    if guess.ndim != 4 or truth.ndim != 4 or guess.shape[1:] != truth.shape[1:]:
        raise UsageError(
            f"expected guesses and truths (N, C, H, W) of one image shape, "
            f"got {sides(guess.shape)} and {sides(truth.shape)}"
        )
    if not len(guess) or not len(truth):
        return torch.full((len(truth),), NO_GUESS)
    costs = (_COSTS[cost] if isinstance(cost, str) else cost)(guess, truth).detach().to("cpu", torch.float64)
    if costs.shape != (len(guess), len(truth)):
        raise UsageError(f"expected costs {len(guess)} x {len(truth)}, one per pair, got {sides(costs.shape)}")
    return assign(costs)


def assign(costs: Tensor) -> Tensor:
    """The row of each column of costs (G, T), for the smallest total; -1 for a column without a row. See `match`."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    assignment = torch.full((costs.shape[1],), NO_GUESS)
    rows, columns = linear_sum_assignment(_finite(costs).numpy())
    assignment[torch.as_tensor(columns)] = torch.as_tensor(rows)
    return assignment


def align(guess: Tensor, truth: Tensor, assignment: Tensor) -> Tensor:
    """The guesses in the order of the truths; mid-grey for a truth without a guess."""
    found = assignment != NO_GUESS
    aligned = torch.full_like(truth, GREY, dtype=guess.dtype, device=guess.device)
    aligned[found.to(guess.device)] = guess[assignment[found].to(guess.device)]
    return aligned


def score(
    guess: Tensor, truth: Tensor, metrics: Iterable[Metric], *, cost: Literal["mse"] | Cost = "mse"
) -> dict[str, Tensor]:
    """Match once, then compute every metric: (T,) scores in the order of the truths, by the name of the metric.

    A truth without a guess is scored with a mid-grey image: without that score, the mean would favour an attack that
    guesses only easy examples. `match` returns which truths these are.
    """
    aligned = align(guess, truth, match(guess, truth, cost))
    return {metric.name: metric(aligned, truth) for metric in metrics}


def _finite(costs: Tensor) -> Tensor:
    """The costs, with those that are not finite replaced by one above the total of any assignment without them."""
    usable = costs[costs.isfinite()]
    if usable.numel() == costs.numel():
        return costs
    span = float(usable.max() - usable.min()) if usable.numel() else 0.0
    top = float(usable.max()) if usable.numel() else 0.0
    return torch.where(costs.isfinite(), costs, top + (span + 1) * min(costs.shape))
