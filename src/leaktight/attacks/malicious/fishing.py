"""Fishing: a malicious server changes the last layer so that one image of a batch dominates the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from leaktight.attacks.labels.last_layer import head_gradient
from leaktight.attacks.labels.rules import Geng, Given
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import LayerCosine
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.presets.preset import Preset
from leaktight.core.errors import ModelError, UsageError, require_at_least
from leaktight.core.protocols import ActiveAttack, Progress, require_seen
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Broadcast, Observation, Reconstruction
from leaktight.models.source import require_choice

Strategy = Literal["auto", "class", "feature", "none"]

_LARGEST = 1e30
"""A threshold beyond this is a quotient of rounding errors: the update has no example of the class."""


class Catch(NamedTuple):
    """The mean features (F,) of the target class in the update of a query, and of how many examples it is the mean."""

    features: Tensor
    number: float


@dataclass(frozen=True, kw_only=True)
class Fishing(Preset, ActiveAttack):
    """Fishing: a changed last layer makes one image of a batch dominate the gradient; then that one is inverted.

    The first query has the unchanged model: labels are read from it, or given. strategy: "class": all logits but that
    of the target class are held at `class_bias`, so that examples of other classes have no gradient below the last
    layer; enough if the class occurs once. "feature": after that, a threshold on one feature decides which examples of
    the class have a gradient; it moves to their mean until nothing changes. "auto" chooses by how often the class
    occurs. "none" changes nothing (ablation). The image is then searched for with AGIC's layer-weighted cosine, total
    variation and signed Adam.

    target: the class; None: the first of the rarest that occur. class_bias: the logit of all other classes.
    class_weight: weights of its row; its product with the sum of the features must stay well below `class_bias`.
    feature_weight: weight of the deciding feature.
    learning_rate: of the search. total_variation: the prior's weight.
    beta: how much more late layers weigh, as in AGIC.
    max_queries: the most rounds, >= 3. strength: how far the last layer moves from the original to the changed one, in
    (0, 1].

    Reference: Wen et al., Fishing for User Data in Large-Batch Federated Learning, ICML 2022.
    Assumes: the number of examples, one local step on all of them, the same examples in every query, and batch
    normalisation in evaluation mode: in training mode every example influences the others.
    Differs from published code: the biases of other classes are 0 in the feature stage, so that the cut is exactly at
    the threshold; layers are weighted as in AGIC (`beta`), without which a search on ResNet-18 finds nothing in
    hundreds of iterations; the last layer, in which all examples mix, is not matched. Examples of other classes above
    the threshold keep a gradient too, so the gradient may be of more than the one image.
    """

    iterations: int = 4000
    strategy: Strategy = "auto"
    target: int | None = None
    class_weight: float = 0.5
    class_bias: float = 1000.0
    feature_weight: float = 300.0
    max_queries: int = 10
    strength: float = 1.0
    learning_rate: float = 0.025
    total_variation: float = 4e-4
    beta: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("strategy", self.strategy, get_args(Strategy))
        require_at_least(3, max_queries=self.max_queries)
        if not 0 < self.strength <= 1:
            raise ValueError(f"expected strength in (0, 1], got {self.strength}")

    @property
    def requires(self) -> frozenset[Knowledge]:
        return frozenset({Knowledge.BATCH_SIZE})

    def matching(self) -> Matching:
        return replace(
            self.shared(),
            objective=LayerCosine(beta=self.beta),
            labels=self.labels or Geng(),
            priors=((self.total_variation, TotalVariation()),),
            optimizer=Adam(learning_rate=self.learning_rate, slope="sign", decay="cosine", warm_up=50),
        )

    def tamper(self, broadcast: Broadcast, seen: Sequence[Observation], *, rng: Rng) -> Broadcast | None:
        if not seen:
            return broadcast
        target, strategy = self._plan(require_seen(self, seen), rng)
        if strategy == "none" or len(seen) >= self.max_queries or (strategy == "class" and len(seen) == 2):
            return None
        if len(seen) == 1:
            return self._changed(broadcast, seen[0], target)
        if any(not bool(head_gradient(each).needed_bias()[target]) for each in seen[1:]):
            return None  # a defense withheld it; features cannot be told without
        feature = int(caught(seen[1], target).features.argmax())
        thresholds = [float(caught(each, target).features[feature]) for each in seen[1:]]
        lost = not abs(self.feature_weight * thresholds[-1]) < _LARGEST
        if lost or any(abs(thresholds[-1] - earlier) < 1e-6 for earlier in thresholds[:-1]):
            return None
        return self._changed(broadcast, seen[0], target, feature, thresholds[-1])

    def _plan(self, seen: Observation, rng: Rng) -> tuple[int, Strategy]:
        """The target class and the strategy, from the labels of the first update."""
        require(seen, *self.requires)
        labels = seen.labels
        if labels is None:
            strategy = self.labels or Geng()
            labels = strategy.infer(seen, seen.batch_size or 0, rng=rng.child("labels"))
        counts = torch.bincount(labels, minlength=seen.num_classes)
        target = self.target
        if target is None:
            target = int(torch.where(counts > 0, counts, len(labels) + 1).argmin())
        if not 0 <= target < seen.num_classes:
            raise UsageError(f"expected target below {seen.num_classes}, got {target}")
        if seen.labels is not None and not counts[target]:
            raise UsageError(f"expected an example of class {target} in the batch, got none; choose another target")
        chosen: Strategy = "class" if counts[target] <= 1 else "feature"
        return target, chosen if self.strategy == "auto" else self.strategy

    def _changed(
        self, broadcast: Broadcast, seen: Observation, target: int, feature: int | None = None, threshold: float = 0.0
    ) -> Broadcast:
        """The broadcast with a changed last layer: for the whole class, or with a threshold on a feature."""
        head = head_gradient(seen)
        if head.layer.bias is None:
            raise ModelError(f"expected a bias in the last layer {head.name!r}, got none; fishing needs one")
        names = [head.name_of(part) for part in ("weight", "bias")]
        weight, bias = (broadcast.params[name] for name in names)
        rows, shifts = torch.zeros_like(weight), torch.zeros_like(bias)
        if feature is None:
            rows[target] = self.class_weight
            shifts = torch.full_like(bias, self.class_bias)
            shifts[target] = bias[target]
        else:
            rows[target, feature] = self.feature_weight
            shifts[target] = -self.feature_weight * threshold
        moved = {
            name: old + self.strength * (new - old)
            for name, old, new in zip(names, (weight, bias), (rows, shifts), strict=True)
        }
        return replace(broadcast, params={**broadcast.params, **moved})

    def composition(self) -> Matching | None:
        return None

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        target, strategy = self._plan(require_seen(self, seen), rng)
        one = self.catch(seen, rng=rng)
        found = replace(self.matching(), labels=Given()).reconstruct([one], rng=rng, progress=progress)
        notes = {"target": target, "strategy": strategy, "queries": len(seen)}
        return replace(found, notes={**found.notes, **notes})

    def catch(self, seen: Sequence[Observation], *, rng: Rng) -> Observation:
        """The last update as that of one image alone: without the last layer, and times the batch size."""
        target, strategy = self._plan(seen[0], rng)
        last, number = seen[-1], seen[-1].batch_size or 1
        head = head_gradient(last)
        mixed = () if strategy == "none" else tuple(head.name_of(part) for part in ("weight", "bias"))
        tensors = {name: number * tensor for name, tensor in last.update.tensors.items() if name not in mixed}
        return replace(last, update=replace(last.update, tensors=tensors), labels=torch.tensor([target]), batch_size=1)


def caught(seen: Observation, target: int) -> Catch:
    """The mean features of the target class, from the last layer's gradient, whose bias there is not 0."""
    head = head_gradient(seen)
    weight, bias = head.needed_weight()[target], head.needed_bias()[target]
    return Catch(weight / bias, -float(bias) * (seen.batch_size or 1))
