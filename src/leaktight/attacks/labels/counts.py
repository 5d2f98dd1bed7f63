"""Counts of labels from estimates, and the mean gradient behind a model change."""

from __future__ import annotations

import torch
from torch import Tensor

from leaktight.attacks.labels.last_layer import HeadGradient
from leaktight.core.errors import UsageError
from leaktight.core.threat import Knowledge, require
from leaktight.core.training import LocalTraining
from leaktight.core.types import Observation


def sgd_of(seen: Observation) -> LocalTraining:
    """The local training behind a model change; an error unless it is disclosed and SGD."""
    require(seen, Knowledge.LOCAL_TRAINING)
    local = seen.local_training
    if local is None or local.optimizer != "sgd":
        raise UsageError("expected local training with sgd, got adam, whose steps hide the gradient's size")
    return local


def mean_gradient(seen: Observation, head: HeadGradient, part: str, num_examples: int) -> Tensor:
    """The gradient of the "weight" or "bias" of the last layer, its mean over all local steps."""
    tensor = head.needed_weight() if part == "weight" else head.needed_bias()
    if seen.update.kind == "gradient":
        return tensor
    local = sgd_of(seen)
    steps = sum(step_effects(local, local.num_steps(num_examples)))
    value = seen.broadcast.params[head.name_of(part)].to(tensor)
    return tensor / (local.learning_rate * steps) - local.weight_decay * value


def step_effects(local: LocalTraining, num_steps: int) -> list[float]:
    """The factor of each step's gradient, times the learning rate, in the final change: 1 without momentum.

    >>> step_effects(LocalTraining(momentum=0.5), 3)
    [1.75, 1.5, 1.0]
    """
    kept = [sum(local.momentum**age for age in range(num_steps - step)) for step in range(num_steps)]
    return [1 + local.momentum * each for each in kept] if local.nesterov else kept


def round_to_total(counts: Tensor, total: int) -> Tensor:
    """Integers >= 0 with the sum `total`: negative counts become 0, the rest is scaled, rounded by largest remainders.

    >>> round_to_total(torch.tensor([1.6, -0.4, 2.8]), 4)
    tensor([1, 0, 3])
    """
    positive = counts.clamp(min=0)
    whole = positive.sum()
    scaled = positive * (total / whole) if whole > 0 else torch.full_like(positive, total / len(positive))
    floors = scaled.floor()
    missing = total - int(floors.sum())
    favoured = (scaled - floors).argsort(descending=True, stable=True)[:missing]
    result = floors.long()
    result[favoured] += 1
    return result
