"""Local steps for the tests of defenses that change gradients, and what such a defense makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.core.protocols import ClientFacts, Defense, Step
from leaktight.core.rng import global_seed
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Params, State, Update
from leaktight.fl.local import Meter, Trainer, batch_loss, loss_and_gradient, per_example_gradients


class Outcome(NamedTuple):
    tensors: Params
    state: State
    figures: Mapping[str, float]


def network() -> nn.Module:
    """A smooth convolution and a linear layer, in float64."""
    with global_seed(replayed(0)):
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 3)).double()


def batch(size: int = 6, seed: int = 1) -> Batch:
    generator = replayed(seed).public()
    inputs = torch.rand(size, 1, 6, 6, generator=generator, dtype=torch.float64)
    return Batch(inputs, torch.randint(3, (size,), generator=generator))


def step_of(model: nn.Module, examples: Batch, *, index: int = 0) -> Step:
    """A step on the model's own parameters, in training mode."""
    trainer = Trainer(model.train(), LocalTraining())
    params, buffers = parameters_of(model), buffers_of(model)
    _, gradient = loss_and_gradient(trainer, params, {**buffers}, examples)
    return Step(
        index=index,
        round=0,
        model=model,
        params=params,
        buffers=buffers,
        batch=examples,
        gradient=gradient,
        learning_rate=0.1,
        per_example=partial(per_example_gradients, trainer, params, buffers, examples),
        loss=partial(batch_loss, trainer, buffers, 1.0),
    )


def drawn_step(*shapes: tuple[int, ...], seed: int = 0, index: int = 0) -> Step:
    """A step whose gradient and parameters are random numbers, all different, under the names "0", "1" and so on."""
    generator = replayed(seed).public()

    def draw() -> dict[str, Tensor]:
        return {str(place): torch.randn(shape, generator=generator) for place, shape in enumerate(shapes)}

    return Step(
        index=index,
        round=0,
        model=nn.Identity(),
        params=draw(),
        buffers={},
        batch=batch(1),
        gradient=draw(),
        learning_rate=0.1,
        per_example=dict,
    )


def defended(defense: Defense, step: Step, *, state: State | None = None, seed: int = 0) -> Outcome:
    """What the defense puts in place of the step's gradient."""
    if state is None:
        _, state = defense.start(step.model, ClientFacts("a", 100, 3), rng=replayed(0))
    meter = Meter()
    gradient, state = defense.on_gradient(step, state, rng=replayed(seed).child("gradient"), report=meter)
    return Outcome(gradient, state, meter.figures())


def defended_update(defense: Defense, tensors: Params, *, seed: int = 0) -> Outcome:
    """What the defense puts in place of an update's tensors."""
    meter = Meter()
    update, state = defense.on_update(
        Update(tensors, "delta", 10), {}, rng=replayed(seed).child("update"), report=meter
    )
    return Outcome(update.tensors, state, meter.figures())


def flat(tensors: Params) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
