"""Local training: one routine that trains a client and simulates a client for an attacker.

The order within a round is fixed. `Defense.on_round` may change the learning rates; then for every batch: `on_batch`,
loss and gradient, `on_gradient`, the optimiser's step; then `Defense.on_update` (called by the client). With
`create_graph` every step is differentiable with respect to the batches.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from leaktight.core.devices import CPU, for_float64, placed, working_on
from leaktight.core.errors import ModelError, UsageError
from leaktight.core.kernels import first_derivatives_only
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.tasks import Classification, Task, correct_examples, example_losses
from leaktight.core.tensors import cloned
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Examples, Mode, Params, State, UpdateKind
from leaktight.fl.messages import Evaluated
from leaktight.models.surgery import has_batch_norm, mode_of


@dataclass(frozen=True)
class Trainer:
    """What is the same in all rounds: network, settings of local training, task, defense.

    mode: batch normalisation and dropout run in "train" or "eval" mode.
    """

    model: nn.Module
    local: LocalTraining
    task: Task = Classification()
    defense: Defense = Defense()
    mode: Mode = "train"


@dataclass(frozen=True)
class LocalResult:
    """The result of local training, before `Defense.on_update`.

    gradient: of the last step, after the defense. losses: (steps,), before each step.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    gradient: Params
    losses: Tensor
    state: State = field(default_factory=dict)

    def update(self, received: Params, kind: UpdateKind) -> Params:
        """The tensors to send: the last gradient, or the change of the received parameters."""
        if kind == "gradient":
            return {name: self.gradient[name] for name in received}
        return {name: self.params[name] - tensor for name, tensor in received.items()}


def silent(name: str, value: float) -> None:
    """A report that is ignored."""


class Meter:
    """Collects reported values. `figures` has one of each name: the sum of `*_seconds`, or else `overall`."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, value: float) -> None:
        self.values[name].append(value)

    def figures(self) -> dict[str, float]:
        return {
            name: sum(values) if name.endswith("_seconds") else overall(name, values)
            for name, values in self.values.items()
        }


def overall(name: str, values: Sequence[float]) -> float:
    """One figure for several steps, clients or rounds: the mean; for a privacy budget the largest, as it is a bound.

    >>> overall("epsilon", [1.0, 3.0]), overall("norm", [1.0, 3.0])
    (3.0, 2.0)
    """
    if name.rpartition(".")[2].startswith(("epsilon", "delta")):
        return max(values)
    return sum(values) / len(values)


def local_update(
    trainer: Trainer,
    params: Params,
    buffers: Params,
    batches: Iterable[Batch],
    *,
    learning_rates: Sequence[float | Tensor],
    loss_scale: float = 1.0,
    round_index: int = 0,
    create_graph: bool = False,
    state: State | None = None,
    rng: Rng | None = None,
    report: Report = silent,
) -> LocalResult:
    """Train from `params` on `batches`, one step each. No argument is changed.

    learning_rates: one per step, floats or (for an attacker) tensors. rng: for a defense that draws random numbers.
    """
    rng = rng or Rng.fresh()
    state = {} if state is None else state
    current = dict(params)
    statistics = {name: tensor.clone() for name, tensor in buffers.items()}
    optimizer = make_optimizer(trainer.local)
    losses: list[Tensor] = []
    gradient: Params = {}
    changes_batches = type(trainer.defense).on_batch is not Defense.on_batch
    seconds = 0.0  # of the defense, reported once: to report every step took as long as a cheap hook
    with mode_of(trainer.model, trainer.mode):
        for index, (batch, learning_rate) in enumerate(zip(batches, learning_rates, strict=True)):
            step_rng = rng.child("step", index)
            if changes_batches:
                start = time.perf_counter()
                batch, state = trainer.defense.on_batch(batch, state, rng=step_rng.child("batch"), report=report)
                seconds += time.perf_counter() - start
            loss, gradient = loss_and_gradient(trainer, current, statistics, batch, loss_scale, create_graph)
            step = Step(
                index=index,
                round=round_index,
                model=trainer.model,
                params=current,
                buffers=statistics,
                batch=batch,
                gradient=gradient,
                learning_rate=learning_rate,
                per_example=partial(per_example_gradients, trainer, current, statistics, batch, loss_scale),
                loss=partial(batch_loss, trainer, statistics, loss_scale),
            )
            start = time.perf_counter()
            gradient, state = trainer.defense.on_gradient(step, state, rng=step_rng.child("gradient"), report=report)
            seconds += time.perf_counter() - start
            current = optimizer(current, gradient, learning_rate)
            losses.append(loss.detach())
    if not losses:
        raise UsageError("expected at least one batch to train on, got none")
    report("defense_seconds", seconds)
    return LocalResult(current, statistics, gradient, torch.stack(losses), state)


def loss_and_gradient(
    trainer: Trainer, params: Params, buffers: Params, batch: Batch, loss_scale: float = 1.0, create_graph: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of the batch and its gradient by parameter name. Batch-norm statistics in `buffers` are
    updated in place.

    create_graph: compute with `torch.func`, so that both can be differentiated again; slower.
    """

    def mean_loss(leaves: Params) -> Tensor:
        return _mean_loss(trainer, leaves, buffers, batch, loss_scale)

    if create_graph:
        gradient, loss = grad_and_value(mean_loss)(dict(params))
        return loss, gradient
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    with torch.enable_grad(), first_derivatives_only():
        loss = mean_loss(leaves)
    gradients = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True, materialize_grads=True)
    return loss, dict(zip(leaves, gradients, strict=True))


def batch_loss(trainer: Trainer, buffers: Params, loss_scale: float, params: Params, batch: Batch) -> Tensor:
    """The mean loss of a batch as a function of parameters and batch; buffers are not changed."""
    return _mean_loss(trainer, params, cloned(buffers), batch, loss_scale)


def _mean_loss(trainer: Trainer, params: Params, buffers: Params, batch: Batch, loss_scale: float) -> Tensor:
    outputs = functional_call(trainer.model, (dict(params), dict(buffers)), (batch.inputs,))
    return example_losses(trainer.task, outputs, batch.targets).mean() * loss_scale


def per_example_gradients(
    trainer: Trainer, params: Params, buffers: Params, batch: Batch, loss_scale: float = 1.0
) -> dict[str, Tensor]:
    """The gradient of each example's loss, (N, *shape) by name."""
    if trainer.mode == "train" and has_batch_norm(trainer.model):
        raise ModelError(
            "per-example gradients do not exist with batch normalisation in training mode: each depends on the whole "
            'batch; use a model without it, or model.mode = "eval"'
        )

    def loss(leaves: Params, inputs: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(trainer.model, (dict(leaves), dict(buffers)), (inputs[None],))
        return example_losses(trainer.task, outputs, target[None]).sum() * loss_scale

    with mode_of(trainer.model, trainer.mode):
        each = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
        result: dict[str, Tensor] = each(dict(params), batch.inputs, batch.targets)
    return result


def plan_batches(
    num_examples: int, local: LocalTraining, *, rng: Rng, first: Rng | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The indices of the examples of a round, (n,), and for each step the indices of its batch among these n.

    Every epoch is a new permutation of the same n examples. first: the stream of the first round, from which the
    examples of all rounds are drawn without `local.redraw`; None: this round is the first.
    """
    if local.batch_size > num_examples:
        raise UsageError(
            f"expected batch_size <= the client's examples, got batch_size {local.batch_size} > {num_examples}; "
            "lower local.batch_size or give clients more data"
        )
    stream = rng.secret()
    used = num_examples if local.samples is None else min(local.samples, num_examples)
    chosen = stream.permutation(num_examples)[:used]
    if first is not None and not local.redraw:
        chosen = first.secret().permutation(num_examples)[:used]
    steps: list[Tensor] = []
    num_steps = local.num_steps(num_examples)
    while len(steps) < num_steps:
        order = stream.permutation(used)
        steps.extend(torch.split(order, local.batch_size)[: local.steps_per_epoch(num_examples)])
    return chosen, steps[:num_steps]


def evaluate(
    trainer: Trainer,
    params: Params,
    buffers: Params,
    examples: Examples,
    chunk: int = 500,
    *,
    device: torch.device = CPU,
) -> Evaluated:
    """Score a model in evaluation mode, on a device. chunk: number of examples in a forward pass."""
    total = Evaluated(0, 0, 0.0)
    trainer, params, buffers = placed((trainer, params, buffers), device)
    with torch.no_grad(), first_derivatives_only(), mode_of(trainer.model, "eval"), working_on(device):
        for start in range(0, len(examples), chunk):
            batch = placed(examples.batch(slice(start, start + chunk)), device)
            outputs = functional_call(trainer.model, ({**params}, {**buffers}), (batch.inputs,))
            losses = example_losses(trainer.task, outputs, batch.targets)
            correct = correct_examples(trainer.task, outputs, batch.targets)
            total += Evaluated(len(batch), int(correct.sum()), float(for_float64(losses).double().sum()))
    return total


@contextmanager
def timed(report: Report) -> Iterator[None]:
    """Report the time of the block as time of the defense."""
    start = time.perf_counter()
    yield
    report("defense_seconds", time.perf_counter() - start)


class LocalOptimizer(Protocol):
    """Computes the next parameters from parameters and gradient; keeps its state between calls."""

    def __call__(self, params: Params, gradient: Params, learning_rate: float | Tensor) -> dict[str, Tensor]: ...


class Sgd:
    """`torch.optim.SGD`: momentum, Nesterov, weight decay."""

    def __init__(self, local: LocalTraining) -> None:
        self.local = local
        self.velocity: dict[str, Tensor] = {}

    def __call__(self, params: Params, gradient: Params, learning_rate: float | Tensor) -> dict[str, Tensor]:
        steps = {name: self._direction(name, tensor, gradient[name]) for name, tensor in params.items()}
        if isinstance(learning_rate, Tensor):
            return {name: tensor - learning_rate * steps[name] for name, tensor in params.items()}
        return {name: tensor.sub(steps[name], alpha=learning_rate) for name, tensor in params.items()}

    def _direction(self, name: str, param: Tensor, gradient: Tensor) -> Tensor:
        local = self.local
        if local.weight_decay:
            gradient = gradient + local.weight_decay * param
        if not local.momentum:
            return gradient
        before = self.velocity.get(name)
        velocity = gradient if before is None else local.momentum * before + gradient
        self.velocity[name] = velocity
        return gradient + local.momentum * velocity if local.nesterov else velocity


class Adam:
    """`torch.optim.Adam` with coupled weight decay."""

    def __init__(self, local: LocalTraining) -> None:
        self.local = local
        self.time = 0
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def __call__(self, params: Params, gradient: Params, learning_rate: float | Tensor) -> dict[str, Tensor]:
        self.time += 1
        beta1, beta2 = self.local.betas
        correction1, correction2 = 1 - beta1**self.time, 1 - beta2**self.time
        result = {}
        for name, param in params.items():
            slope = gradient[name] + self.local.weight_decay * param if self.local.weight_decay else gradient[name]
            self.first[name] = beta1 * self.first.get(name, torch.zeros_like(param)) + (1 - beta1) * slope
            self.second[name] = beta2 * self.second.get(name, torch.zeros_like(param)) + (1 - beta2) * slope * slope
            denominator = (self.second[name] / correction2).sqrt() + self.local.epsilon
            result[name] = param - learning_rate * (self.first[name] / correction1) / denominator
        return result


_OPTIMIZERS: Mapping[str, Callable[[LocalTraining], LocalOptimizer]] = {"sgd": Sgd, "adam": Adam}


def make_optimizer(local: LocalTraining) -> LocalOptimizer:
    """A new optimiser with these settings."""
    return _OPTIMIZERS[local.optimizer](local)
