"""Geng's rule: counts of labels estimated from row sums, also for updates of several local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leaktight.attacks.labels.last_layer import HeadGradient, LabelStrategy, check_count, head_gradient, labels_of
from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import add
from leaktight.core.threat import Knowledge, require
from leaktight.core.training import LocalTraining
from leaktight.core.types import Observation, Params
from leaktight.models.source import require_choice
from leaktight.models.surgery import batch_statistics, mode_of, representation


class Behaviour(NamedTuple):
    """Outputs of the network on noise images: mean probabilities (C,), mean sum of the features ()."""

    probabilities: Tensor
    features: Tensor

    def towards(self, end: Behaviour, share: float) -> Behaviour:
        return Behaviour(*(torch.lerp(a, b, share) for a, b in zip(self, end, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Geng(LabelStrategy):
    """Counts of labels, repeats allowed: K (p_c - sum of row c / O), with p and O, the sum of the features, from noise.

    For a delta the sum of the gradients of all steps is used, corrected for momentum and weight decay; p and O are
    interpolated linearly between the model sent and the model returned, and all steps are taken to have the same shares
    of labels. Counts are rounded to the sum K by largest remainders.
    num_dummies: number of noise images, >= 2. mode: of batch norm on them.
    Assumes: features whose sum is not near zero; for a delta, LOCAL_TRAINING with SGD.
    Reference: Geng et al., Towards General Deep Leakage in Federated Learning, 2021; Dimitrov et al., Data Leakage in
    Federated Averaging, TMLR 2022.
    """

    num_dummies: int = 64
    mode: Literal["train", "eval"] = "train"

    def __post_init__(self) -> None:
        require_at_least(2, num_dummies=self.num_dummies)
        require_choice("mode", self.mode, ("train", "eval"))

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        check_count(num_examples)
        head = head_gradient(seen)
        params = seen.broadcast.params
        start = self._behaviour(seen, head, params, rng)
        if seen.update.kind == "gradient":
            shares = start.probabilities - head.row_sums() / start.features
        else:
            require(seen, Knowledge.LOCAL_TRAINING)
            end = self._behaviour(seen, head, add(params, seen.update.tensors), rng)
            shares = _shares_of_delta(seen, head, start, end, num_examples)
        if not bool(torch.isfinite(shares).all()):
            raise UsageError("expected features with a sum other than zero, got zero; use bias_corrected or given")
        return labels_of(round_to_total(shares * num_examples, num_examples))

    def _behaviour(self, seen: Observation, head: HeadGradient, params: Params, rng: Rng) -> Behaviour:
        """Run a model on noise images, the same for every model."""
        images = torch.rand(self.num_dummies, *seen.inputs.shape, generator=rng.public())
        weight = params[head.name_of("weight")]
        bias = params.get(head.name_of("bias"))
        model = batch_statistics(seen.model)
        with torch.no_grad(), mode_of(model, self.mode), global_seed(rng.child("dropout")):
            features = representation(model, params, seen.broadcast.buffers, images.to(weight))
        logits = F.linear(features, weight, bias).flatten(0, -2)
        totals = features.flatten(0, -2).sum(1)
        return Behaviour(logits.softmax(1).mean(0).to("cpu", torch.float64), totals.mean().to("cpu", torch.float64))


def _shares_of_delta(
    seen: Observation, head: HeadGradient, start: Behaviour, end: Behaviour, num_examples: int
) -> Tensor:
    """The fraction of each label (C,), from the sum of the gradients of all local steps."""
    local = seen.local_training
    if local is None or local.optimizer != "sgd":
        raise UsageError("expected local training with sgd for geng, got adam, whose steps hide the gradient's size")
    effects = step_effects(local, local.num_steps(num_examples))
    weight = seen.broadcast.params[head.name_of("weight")].to("cpu", torch.float64)
    total = head.row_sums() / local.learning_rate
    expected = torch.zeros_like(total)
    features = torch.zeros((), dtype=torch.float64)
    for step, effect in enumerate(effects):
        progress = step / len(effects)
        now = start.towards(end, progress)
        expected += effect * now.features * now.probabilities
        features += effect * now.features
        # Weight decay is part of the change but not of the gradient; a delta is minus the head's "gradient".
        total -= effect * local.weight_decay * (weight - progress * head.needed_weight()).sum(1)
    return (expected - total) / features


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
