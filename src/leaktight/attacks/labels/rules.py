"""Rules that read the labels of an update from the gradient of the last linear layer.

With a mean cross-entropy over K examples the gradient of weight row c is the mean of (p_c - y_c) times the features,
and that of bias c the mean of (p_c - y_c): negative for labels that occur, if features are not negative. A delta is
minus the gradient up to a factor, which only `Geng` needs. Labels are returned sorted, (N,); their order is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leaktight.attacks.labels.geng import Geng
from leaktight.attacks.labels.last_layer import LabelStrategy, check_count, head_gradient, labels_of
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.protocols import LabelSource
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Observation

__all__ = ["BiasCorrected", "Geng", "Given", "Idlg", "Joint", "LabelStrategy", "Wainakh", "Yin"]


@dataclass(frozen=True, kw_only=True)
class Given(LabelStrategy):
    """The labels that the threat model discloses. Works for every task."""

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS})
    source: ClassVar[LabelSource] = "given"

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        require(seen, *self.requires)
        labels = seen.labels
        if labels is None or len(labels) != num_examples:
            raise UsageError(f"expected labels of {num_examples} examples, got {0 if labels is None else len(labels)}")
        return labels.clone()


@dataclass(frozen=True, kw_only=True)
class Joint:
    """Labels are searched for together with the images, as logits of a softmax.

    Nothing is inferred before the search, so it is not a `LabelStrategy`.
    Reference: Zhu et al., Deep Leakage from Gradients, NeurIPS 2019.
    """

    requires: ClassVar[frozenset[Knowledge]] = frozenset()
    source: ClassVar[LabelSource] = "searched"

    def draw(self, num_examples: int, num_classes: int, generator: torch.Generator) -> Tensor:
        """The first logits (N, C), from N(0, 1)."""
        return torch.randn(num_examples, num_classes, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Idlg(LabelStrategy):
    """One example: the class whose row of the last weight's gradient has the smallest sum.

    Exact if features are not negative (ReLU, sigmoid).
    Reference: Zhao et al., iDLG: Improved Deep Leakage from Gradients, 2020.
    """

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        if num_examples != 1:
            raise UsageError(f"expected 1 example for idlg, got {num_examples}; use bias_corrected, wainakh or geng")
        return head_gradient(seen).row_sums().argmin().reshape(1)


@dataclass(frozen=True, kw_only=True)
class Yin(LabelStrategy):
    """No label twice: the classes with the smallest entries in their rows of the last weight's gradient.

    Assumes: features that are not negative.
    Reference: Yin et al., See through Gradients, CVPR 2021 (GradInversion).
    """

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        check_count(num_examples)
        if num_examples > seen.num_classes:
            raise UsageError(
                f"expected no label twice, so at most {seen.num_classes} examples for yin, got {num_examples}; "
                "use bias_corrected, wainakh or geng"
            )
        lowest = head_gradient(seen).needed_weight().amin(1)
        return lowest.argsort(stable=True)[:num_examples].sort().values


@dataclass(frozen=True, kw_only=True)
class BiasCorrected(LabelStrategy):
    """Every class with a negative bias gradient once; then, repeatedly, the lowest after one example's share is off.

    The share of an example is the sum of the negative gradients over the number of examples. Assumes nothing about
    features; needs a last layer with a bias. It is the rule "bias-corrected" of the framework breaching.
    """

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        check_count(num_examples)
        bias = head_gradient(seen).needed_bias()
        share = float(bias.clamp(max=0).sum()) / num_examples
        return _take_repeatedly(bias, share, num_examples)


@dataclass(frozen=True, kw_only=True)
class Wainakh(LabelStrategy):
    """The same on the row sums of the last weight's gradient, with 1 + 1 / C times the share (LLG).

    Assumes: features that are not negative.
    Reference: Wainakh et al., User-Level Label Leakage from Gradients in Federated Learning, PETS 2022.
    Differs from published code: the second stage subtracts the share from the class that it chose; there, from another.
    """

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        check_count(num_examples)
        sums = head_gradient(seen).row_sums()
        share = float(sums.clamp(max=0).sum()) / num_examples * (1 + 1 / seen.num_classes)
        return _take_repeatedly(sums, share, num_examples)


def _take_repeatedly(scores: Tensor, share: float, num_examples: int) -> Tensor:
    """Labels (N,): each class with a negative score once, lowest first; then repeatedly that with the lowest score.

    Each time a class is taken, its score rises by -`share`, with `share` <= 0.
    """
    order = scores.argsort(stable=True)
    first = order[: min(num_examples, int((scores < 0).sum()))]
    counts = torch.zeros(len(scores), dtype=torch.long)
    counts[first] = 1
    left = scores - share * counts
    for _ in range(num_examples - len(first)):
        lowest = int(left.argmin())
        counts[lowest] += 1
        left[lowest] -= share
    return labels_of(counts)


def rule_for(seen: Observation) -> LabelStrategy | None:
    """The strategy for the labels of an update: given if disclosed, else the rule that fits; None if none does."""
    if seen.labels is not None:
        return Given()
    try:
        head = head_gradient(seen)
    except LeaktightError:
        return None
    local = seen.local_training
    if local is not None and local.optimizer == "sgd" and seen.num_steps != 1 and head.weight is not None:
        return Geng(mode=seen.mode or "train")
    if head.bias is not None:
        return BiasCorrected()
    if head.weight is None:
        return None
    return Idlg() if seen.batch_size == 1 else Wainakh()
