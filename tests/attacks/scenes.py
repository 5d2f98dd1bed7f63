"""Observations of real updates, for the tests of this folder."""

from __future__ import annotations

from typing import Literal

import torch
from tests.seeds import replayed
from torch import nn

from leaktight.core.inputs import Images
from leaktight.core.tasks import Classification
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Observation, Update, UpdateKind
from leaktight.data.dataset import Dataset
from leaktight.fl.local import Trainer, local_update, plan_batches


def draw(data: Dataset, count: int, seed: int, classes: int | None = None, unique: bool = False) -> Batch:
    """Random training examples: of all classes, of some `classes`, or with no label twice."""
    generator = replayed(seed).child("examples").public()
    order = torch.randperm(len(data.train), generator=generator)
    targets = data.train.targets[order]
    if classes is not None:
        kept = torch.randperm(data.num_classes, generator=generator)[:classes]
        order = order[torch.isin(targets, kept)]
    if unique:
        first = torch.stack([(targets == label).nonzero()[0, 0] for label in targets.unique()])
        order = order[first][torch.randperm(len(first), generator=generator)]
    return data.train.batch(order[:count])


def observe(
    model: nn.Module,
    batch: Batch,
    num_classes: int,
    *,
    local: LocalTraining | None = None,
    mode: Literal["train", "eval"] = "train",
    seed: int = 0,
) -> Observation:
    """The gradient of the batch or, given `local`, the change after that local training on it."""
    settings = local or LocalTraining(batch_size=len(batch))
    kind: UpdateKind = "gradient" if local is None else "delta"
    _, steps = plan_batches(len(batch), settings, rng=replayed(seed).child("steps"))
    params, buffers = cloned(parameters_of(model)), cloned(buffers_of(model))
    result = local_update(
        Trainer(model, settings, mode=mode),
        params,
        buffers,
        [Batch(batch.inputs[step], batch.targets[step]) for step in steps],
        learning_rates=[settings.learning_rate] * len(steps),
    )
    return Observation(
        model=model,
        task=Classification(),
        broadcast=Broadcast(params, buffers, 0),
        update=Update(result.update(params, kind), kind, len(batch), result.buffers),
        inputs=Images(*batch.inputs.shape[1:]),
        num_classes=num_classes,
        batch_size=len(batch),
        local_training=local,
        mode=mode,
    )
