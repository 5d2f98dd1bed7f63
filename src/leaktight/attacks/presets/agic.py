"""AGIC: one-batch approximation, layer weights, and reconstruction from the updates of several epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Literal

import torch
import torch.nn.functional as F

from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.attack import Matching, MatchingResult
from leaktight.attacks.matching.layer_weights import Weighting
from leaktight.attacks.matching.objectives import LayerCosine
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.slopes import Slopes
from leaktight.attacks.matching.view import Evidence, OneBatch
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.first_order import Decay
from leaktight.attacks.presets.preset import LocalMatch, Preset
from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Observation, Reconstruction


@dataclass(frozen=True, kw_only=True)
class Agic(Preset):
    """AGIC: the change of a round is matched as one batch's gradient, by layer-weighted cosine; epochs can be joined.

    One observation is reconstructed by itself. Several must be the updates of `epochs` whole epochs, equally many of
    each. The images of each update are reconstructed roughly, matched one to one across epochs, and each is then
    reconstructed from all updates that it is part of. The answer has the examples of the first epoch, by update.

    beta: the weight of the last convolution, where the first has 1; 50 for untrained networks, 2 for trained ones.
    weighting: how weights change from layer to layer. relu_modifier: layers with many exact zeros weigh more.
    slope: the step follows Adam's direction ("plain"), its "sign" or its "soft_sign".
    epochs: how many whole epochs the observations are, >= 1.
    learning_rate: of Adam. decay: how it falls over the iterations. total_variation: the prior's weight.
    slopes: of the loss by the logits, "guessed" or "observed" in the last layer's gradient.
    pre_iterations: of the rough reconstructions. later_weight: of the updates after the first epoch, >= 0.
    Reference: Xu et al. 2022. Assumes: labels (or a rule for them), the number of examples.
    Differs from the paper: it does not name the optimiser; here signed Adam with step decay, as in Inverting Gradients.
    """

    iterations: int = 10000
    learning_rate: float = 0.025
    slope: Literal["plain", "sign", "soft_sign"] = "sign"
    decay: Decay = "steps"
    slopes: Slopes = "observed"
    total_variation: float = 4e-4
    beta: float = 50.0
    weighting: Weighting = "increase_linear"
    relu_modifier: bool = True
    local: LocalMatch = "one_batch"
    epochs: int = 1
    pre_iterations: int = 2000
    later_weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, epochs=self.epochs)
        require_at_least(0, later_weight=self.later_weight)

    def matching(self) -> Matching:
        shared = self.shared()
        return replace(
            shared,
            matched=OneBatch(scale="sum") if self.local == "one_batch" else shared.matched,
            objective=LayerCosine(weighting=self.weighting, beta=self.beta, relu_modifier=self.relu_modifier),
            labels=self.labels or Given(),
            slopes=self.slopes,
            priors=((self.total_variation, TotalVariation()),),
            optimizer=Adam(learning_rate=self.learning_rate, slope=self.slope, decay=self.decay),
        )

    @property
    def needs_rounds(self) -> int | None:
        return None if self.epochs == 1 else self.epochs

    def composition(self) -> Matching | None:
        return self.matching() if self.epochs == 1 else None

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        if self.epochs == 1:
            return super().reconstruct(seen, rng=rng, progress=progress)
        if not seen or len(seen) % self.epochs:
            raise UsageError(f"expected equally many updates of each of {self.epochs} epochs, got {len(seen)} in all")
        size = len(seen) // self.epochs
        ordered = sorted(seen, key=lambda each: each.broadcast.round)
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        attack = self.matching()
        rough = [
            [
                replace(attack, iterations=self.pre_iterations).reconstruct(
                    [each], rng=rng.child("rough", epoch, place), progress=progress
                )
                for place, each in enumerate(part)
            ]
            for epoch, part in enumerate(parts)
        ]
        chains = match_epochs([[found.guess for found in part] for part in rough])
        results = [
            self._jointly(attack, parts, rough, chain, rng=rng.child("joint", number), progress=progress)
            for number, chain in enumerate(chains)
        ]
        guesses = [found.guess for found in results]
        guess = Batch(
            torch.stack([each.inputs[0] for each in guesses]), torch.stack([each.targets[0] for each in guesses])
        )
        notes = {"chains": chains, "updates_per_epoch": size, "backend": results[0].search.backend}
        begun = [attack.optimizer.first_loss(found.search.candidates) for found in results]
        firsts = [each for each in begun if each is not None]
        loss = fmean(found.search.best.loss for found in results)
        return Reconstruction(guess, loss, notes, first_loss=fmean(firsts) if firsts else None)

    def _jointly(
        self,
        attack: Matching,
        parts: Sequence[Sequence[Observation]],
        rough: Sequence[Sequence[Reconstruction]],
        chain: Sequence[ExampleIndex],
        *,
        rng: Rng,
        progress: Progress | None,
    ) -> MatchingResult:
        """Reconstruct one example, the first of the result, from all updates that it is part of, together with their
        other examples."""
        views = []
        labels = [rough[0][chain[0].update].guess.targets[chain[0].example]]
        for epoch, place in enumerate(chain):
            view = attack.view(parts[epoch][place.update])
            targets = rough[epoch][place.update].guess.targets
            members = []
            for example in range(len(targets)):
                if example == place.example:
                    members.append(0)
                else:
                    members.append(len(labels))
                    labels.append(targets[example])
            views.append((1.0 if epoch == 0 else self.later_weight, view, tuple(members)))
        first = parts[0][0]
        evidence = Evidence(views, torch.stack(labels), len(labels), first.inputs.shape, first.num_classes)
        return attack.search(evidence, rng=rng, progress=progress)


@dataclass(frozen=True)
class ExampleIndex:
    """An example of an epoch: the index of its update, and its index in that update."""

    update: int
    example: int


def match_epochs(epochs: Sequence[Sequence[Batch]], pool: int = 2) -> list[tuple[ExampleIndex, ...]]:
    """For each example of the first epoch its indices in all epochs, matched from each epoch to the next.

    epochs: for each epoch the reconstructed batches of its updates. pool: side of the average pooling before images are
    compared.
    """
    places = [[ExampleIndex(u, e) for u, batch in enumerate(part) for e in range(len(batch))] for part in epochs]
    if len({len(each) for each in places}) != 1:
        raise UsageError("expected epochs of equally many examples, got others; give whole epochs of the same data")
    chains: list[tuple[ExampleIndex, ...]] = [(place,) for place in places[0]]
    for number in range(len(epochs) - 1):
        pairs = _match_pair(epochs[number], epochs[number + 1], pool)
        following = {places[number][left]: places[number + 1][right] for left, right in pairs}
        chains = [(*chain, following[chain[-1]]) for chain in chains]
    return chains


def _match_pair(left: Sequence[Batch], right: Sequence[Batch], pool: int) -> list[tuple[int, int]]:
    """One-to-one pairs of examples, the most similar first; pairs whose updates share a label come first."""
    images = [
        F.avg_pool2d(torch.cat([batch.inputs for batch in side]).clamp(0, 1), pool).flatten(1) for side in (left, right)
    ]
    distance = torch.cdist(images[0].double(), images[1].double()).square() / images[0].shape[1]
    labels = [[set(batch.targets.tolist()) for batch in side for _ in range(len(batch))] for side in (left, right)]
    strangers = torch.tensor([[not (mine & theirs) for theirs in labels[1]] for mine in labels[0]])
    ranked = sorted(
        (bool(strangers[i, j]), float(distance[i, j]), i, j) for i, j in product(*(range(len(side)) for side in images))
    )
    taken: tuple[set[int], set[int]] = (set(), set())
    pairs = []
    for _, _, i, j in ranked:
        if i not in taken[0] and j not in taken[1]:
            pairs.append((i, j))
            taken[0].add(i)
            taken[1].add(j)
    return pairs
