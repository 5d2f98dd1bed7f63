"""Rules that read the labels of an update from the gradient of the last linear layer.

With a mean cross-entropy over K examples the gradient of weight row c is the mean of (p_c - y_c) times the features,
and that of bias c the mean of (p_c - y_c): negative for labels that occur, if features are not negative. A delta is
minus the gradient up to a factor, which only `Geng` needs. Labels are returned sorted, (N,); their order is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leaktight.attacks.labels.counts import round_to_total, sgd_of, step_effects
from leaktight.attacks.labels.ilrg import Ilrg
from leaktight.attacks.labels.last_layer import HeadGradient, LabelStrategy, check_count, head_gradient, labels_of
from leaktight.attacks.labels.public import PublicImages
from leaktight.core.errors import LeaktightError, UsageError, require_at_least
from leaktight.core.protocols import LabelSource
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import add
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Observation, Params
from leaktight.models.source import require_choice
from leaktight.models.surgery import batch_statistics, mode_of, representation


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
    """Every class with a negative bias gradient once; then repeatedly the lowest, less one example's share each time.

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
    """As `bias_corrected`, on the row sums of the last weight's gradient, with 1 + 1 / C times the share (LLG).

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
    sgd = local is not None and local.optimizer == "sgd"
    biased = head.name_of("bias") in seen.broadcast.params
    readable = (head.bias if biased else head.weight) is not None
    scaled = seen.update.kind == "gradient" or (sgd and seen.num_steps is not None)
    if readable and scaled and seen.public_data is not None and len(seen.public_data) > 1:
        return PublicImages()
    if sgd and seen.num_steps != 1 and head.weight is not None:
        return Geng(mode=seen.mode or "train")
    if head.bias is not None:
        return Ilrg() if scaled and head.weight is not None and seen.batch_size != 1 else BiasCorrected()
    if head.weight is None:
        return None
    return Idlg() if seen.batch_size == 1 else Wainakh()


@dataclass(frozen=True, kw_only=True)
class Inferred(LabelStrategy):
    """The rule that fits the update: by public images, Geng's, iLRG, by the bias, Wainakh's or iDLG's.

    It is what attacks do by themselves where labels are not disclosed.
    Cannot: read the labels of an update without the last linear layer, or of words.
    """

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        blind = replace(seen, labels=None)
        rule = rule_for(blind)
        if rule is None:
            head_gradient(blind).needed_weight()  # says what is missing
            raise UsageError("expected an update that shows the last linear layer, got none; disclose the labels")
        return rule.infer(blind, num_examples, rng=rng)


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
            sgd_of(seen)
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
    local = sgd_of(seen)
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
