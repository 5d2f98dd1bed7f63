"""Retrieval: public examples whose updates resemble the observed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.matching.objectives import Cosine
from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.protocols import Attack, LabelSource, Progress, require_seen
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import cloned
from leaktight.core.threat import Knowledge, require
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.fl.local import Trainer, loss_and_gradient
from leaktight.models.source import require_choice
from leaktight.models.surgery import mode_of


@dataclass(frozen=True, kw_only=True)
class NearestPublicImage(Attack):
    """The public images whose gradients have the largest cosine with the update, one per example, none twice.

    It shows what retrieval achieves without reconstruction. Nothing is minimised. The gradient of each public image is
    that of a batch of one with its own label, on the model sent. Only the first update is used, a delta as minus the
    gradient. The answer has one image if the number of examples is not disclosed. The loss is the mean of 1 - cosine.
    If labels are disclosed or inferred by `labels`, the answer has for each the nearest image of its class, or of any
    class if none is left. Otherwise it has the nearest of all, which for a batch are often of the one class that
    dominates the update.
    labels: the rule that reads labels from the update; None: those that are disclosed.
    candidates: number of public images to compare, drawn at random, >= 1; None: all. mode: of batch norm.
    """

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.PUBLIC_DATA})

    labels: LabelStrategy | None = None
    candidates: int | None = 512
    mode: Literal["train", "eval"] = "train"

    def __post_init__(self) -> None:
        require_at_least(1, candidates=self.candidates)
        require_choice("mode", self.mode, ("train", "eval"))

    @property
    def searches(self) -> bool:
        return False

    @property
    def labels_from(self) -> LabelSource:
        return "not needed" if self.labels is None else self.labels.source

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        first = require_seen(self, seen)
        require(first, *self.requires)
        public, count = first.public_data, first.batch_size or 1
        if public is None or len(public) < count:
            raise UsageError(
                f"expected at least {count} public images, got {0 if public is None else len(public)}; disclose more"
            )
        pool = torch.randperm(len(public), generator=rng.child("pool").public())
        pool = pool[: max(self.candidates or len(public), count)]
        distances = self._distances(first, Batch(public.inputs[pool], public.targets[pool]), rng, progress)
        wanted = self._wanted(first, count, rng)
        best = distances.argsort(stable=True)[:count]
        if wanted is not None:
            best = _nearest_by_class(distances, public.targets[pool], wanted)
        chosen = pool[best]
        return Reconstruction(
            Batch(public.inputs[chosen].clone(), public.targets[chosen].clone()),
            float(distances[best].mean()),
            {"places": chosen.tolist(), "distances": distances[best].tolist()},
            first_loss=float(distances[0]),
        )

    def _wanted(self, seen: Observation, count: int, rng: Rng) -> Tensor | None:
        """The labels by which images are chosen, (N,), or None."""
        if not seen.task.one_class:
            return None
        if seen.labels is not None and len(seen.labels) == count:
            return seen.labels
        return None if self.labels is None else self.labels.infer(seen, count, rng=rng.child("labels"))

    def _distances(self, seen: Observation, public: Batch, rng: Rng, progress: Progress | None) -> Tensor:
        """1 - cosine between each public image's gradient and the update, (N,)."""
        sign = -1.0 if seen.update.kind == "delta" else 1.0
        target = {name: sign * tensor for name, tensor in seen.update.tensors.items()}
        objective = Cosine()
        prepared = objective.prepare(target, seen.model, seen.inputs.shape)
        trainer = Trainer(seen.model, LocalTraining(), seen.task, mode=self.mode)
        distances: list[float] = []
        with mode_of(seen.model, self.mode), global_seed(rng.child("dropout")):
            for place in range(len(public)):
                one = Batch(public.inputs[place : place + 1], public.targets[place : place + 1])
                buffers = cloned(seen.broadcast.buffers)  # batch norm updates them in place
                _, gradient = loss_and_gradient(trainer, seen.broadcast.params, buffers, one)
                distances.append(float(objective.loss(gradient, prepared)))
                if progress is not None:
                    progress(place, min(distances), None)
        return torch.tensor(distances, dtype=torch.float64)


def _nearest_by_class(distances: Tensor, classes: Tensor, wanted: Tensor) -> Tensor:
    """For each label the index of the nearest image of that class, or of any class if none is left; none twice."""
    order: list[int] = distances.argsort(stable=True).tolist()
    known: list[int] = classes.tolist()
    chosen: list[int] = []
    for label in wanted.tolist():
        place = next((place for place in order if known[place] == label), order[0])
        order.remove(place)
        chosen.append(place)
    return torch.tensor(chosen)
