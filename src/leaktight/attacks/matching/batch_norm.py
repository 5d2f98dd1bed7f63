"""The batch-norm statistics of a client's batch, from the running ones that it was sent and that it sent back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from leaktight.core.types import Observation


class Statistics(NamedTuple):
    """By layer: the names of its mean and of its unbiased variance among the statistics of a view."""

    mean: str
    variance: str


def statistics_of(layer: str) -> Statistics:
    """The names of a layer's statistics."""
    return Statistics(f"{layer}.running_mean", f"{layer}.running_var")


def sent_statistics(seen: Observation) -> dict[str, Tensor]:
    """The mean and the unbiased variance that each batch-norm layer met, by the names of its running statistics.

    A step in training mode makes the running value (1 - m) old + m batch, with momentum m. After one step that gives
    the batch's own exactly; after k steps their mean, in which later steps weigh more. Empty if the client sent none,
    if its batch norm is in evaluation mode, or if the number of steps is unknown. In float64.
    """
    sent, steps = seen.update.buffers, seen.num_steps
    if not sent or not steps or (seen.mode or "train") != "train":
        return {}
    found: dict[str, Tensor] = {}
    for layer, module in seen.model.named_modules():
        if not isinstance(module, _BatchNorm) or not module.track_running_stats:
            continue
        kept = _kept(module, layer, seen, steps)
        for name in statistics_of(layer):
            if name in sent and name in seen.broadcast.buffers and kept < 1:
                new, old = sent[name].double(), seen.broadcast.buffers[name].double()
                value = (new - kept * old) / (1 - kept)
                if bool(torch.isfinite(value).all()):
                    found[name] = value
    return found


def _kept(module: _BatchNorm, layer: str, seen: Observation, steps: int) -> float:
    """The share of the old value in the new one; without a momentum it is a mean over all batches."""
    if module.momentum is not None:
        return float((1 - module.momentum) ** steps)
    before = int(seen.broadcast.buffers.get(f"{layer}.num_batches_tracked", torch.zeros(())))
    return before / (before + steps)
