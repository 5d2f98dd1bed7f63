"""What the attacker computes from its guess, and what it compares that with.

A gradient update is compared with the gradient of the guess. A model change after several local steps is simulated
step by step with the clients' own routine (`fl.local.local_update`), or treated as the gradient of one batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from leaktight.attacks.matching.batch_norm import sent_statistics
from leaktight.core.devices import device_of
from leaktight.core.errors import NotDisclosedError, UsageError, require_at_least
from leaktight.core.protocols import Defense, RoundPlan
from leaktight.core.rng import Rng
from leaktight.core.tensors import first_non_finite
from leaktight.core.text import sides
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, Params, Update
from leaktight.fl.local import Trainer, local_update, loss_and_gradient, silent
from leaktight.models.surgery import batch_statistics, mode_of

_NO_RNG = Rng(0)  # never used: an attacker's model of a defense draws no random numbers


@dataclass(frozen=True)
class Unknown:
    """A private tensor of the client that is searched for beside its examples; it starts at start + spread N(0, 1)."""

    start: Tensor
    spread: float = 0.0

    def draw(self, rng: Rng) -> Tensor:
        """The value at the start of a restart."""
        noise = torch.randn(self.start.shape, generator=rng.public(), dtype=torch.float64)
        return self.start + self.spread * noise.to(self.start)


@dataclass(frozen=True)
class View:
    """One observed update, prepared for matching.

    trainer: how the update of a guess is computed; its defense is the attacker's model of the client's, whose hooks are
    pure functions of tensors. params, buffers: of the model that was sent; buffers include untrained parameters.
    target: the tensors that the update of the guess is compared with.
    steps: for every simulated step the indices of its examples and its learning rate; empty to match one gradient.
    notes: what the attacker assumed.
    weights: factors on the entries of guess and target, by name; 1 for the rest.
    unknowns: tensors to search for beside the images. One named like a buffer replaces that buffer; all of them are the
    state of the trainer's defense.
    trained: those unknowns that are parameters of the client, which its local steps change.
    held: further tensors of that state, which are known or assumed, by name.
    annealed: buffers that fall exponentially from the first value to the second during the search.
    orders: the most orders of the examples over the steps that are compared; 1: the order is that of `steps`.
    slopes: (N, C), the derivatives of the loss by the outputs where they are known (`slopes.py`); the trainer's task
    takes them in place of labels.
    statistics: those of batch norm that the client's batch had, by the names of the running ones (`batch_norm.py`).
    """

    trainer: Trainer
    params: Params
    buffers: Params
    target: Params
    steps: Sequence[tuple[tuple[int, ...], float]] = ()
    notes: Sequence[str] = field(default_factory=tuple)
    weights: Params = field(default_factory=dict)
    unknowns: Mapping[str, Unknown] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    held: Params = field(default_factory=dict)
    annealed: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    orders: int = 1
    slopes: Tensor | None = None
    statistics: Params = field(default_factory=dict)

    def guess(
        self, images: Tensor, labels: Tensor, params: Params, buffers: Params, unknowns: Params | None = None
    ) -> Params:
        """The update that a client with these examples would send, a pure function of tensors."""
        state = unknowns or {}
        buffers = {name: state.get(name, tensor) for name, tensor in buffers.items() if name not in self.trained}
        params = {**params, **{name: state[name] for name in self.trained}}
        defense = self.trainer.defense
        if not self.steps and type(defense) is Defense:
            with mode_of(self.trainer.model, self.trainer.mode):
                return loss_and_gradient(self.trainer, params, buffers, Batch(images, labels), create_graph=True)[1]
        steps = self.steps or [(tuple(range(len(images))), 1.0)]
        batches = [Batch(taken(images, places), taken(labels, places)) for places, _ in steps]
        plan, state = defense.on_round(
            RoundPlan(0, tuple(rate for _, rate in steps)), state, rng=_NO_RNG, report=silent
        )
        rates = plan.learning_rates
        result = local_update(
            self.trainer, params, buffers, batches, learning_rates=rates, create_graph=True, state=state, rng=_NO_RNG
        )
        kind: Literal["gradient", "delta"] = "delta" if self.steps else "gradient"
        update = Update(result.update(params, kind), kind)
        return defense.on_update(update, result.state, rng=_NO_RNG, report=silent)[0].tensors

    def buffers_at(self, share: Tensor | None, buffers: Params) -> Params:
        """The buffers at a fraction of the search, a 0-d tensor; None for its end. buffers: those at the end."""
        if share is None or not self.annealed:
            return buffers
        moving = {name: first * (share * math.log(last / first)).exp() for name, (first, last) in self.annealed.items()}
        return {**buffers, **moving}

    @property
    def precision(self) -> torch.dtype:
        """The floating-point type of the computation."""
        return next(iter(self.params.values())).dtype

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return device_of(self.params)

    @property
    def starts(self) -> Params:
        """The state of the trainer's defense before a search: the mean initial value of every unknown, and `held`."""
        return {**self.held, **{name: unknown.start for name, unknown in self.unknowns.items()}}

    def weighted(self, tensors: Params, weights: Params) -> Params:
        """The tensors times these weights, by name."""
        if not weights:
            return tensors
        return {name: tensor * weights[name] if name in weights else tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Evidence:
    """All updates that one search matches.

    views: for each update a weight, the view, and the indices of its examples among all that are searched for.
    labels: (num_examples,), or None if they are searched for. shape: of one image.
    ordered: whether labels are in the order of the steps; otherwise they are known as a set.
    """

    views: Sequence[tuple[float, View, tuple[int, ...]]]
    labels: Tensor | None
    num_examples: int
    shape: tuple[int, ...]
    num_classes: int
    ordered: bool = False

    @property
    def device(self) -> torch.device:
        """Where the search is computed: where the updates are."""
        return self.views[0][1].device

    @property
    def annealed(self) -> bool:
        """Whether the network of guesses changes during the search, so that losses of two iterations do not compare."""
        return any(view.annealed for _, view, _ in self.views)

    @property
    def seeks_images_alone(self) -> bool:
        """Whether nothing else is searched for: neither labels nor what a defense keeps secret."""
        return self.labels is not None and not any(view.unknowns for _, view, _ in self.views)


@dataclass(frozen=True, kw_only=True)
class Matched(ABC):
    """How the update of a guess is computed and compared."""

    def view(self, seen: Observation, num_examples: int, precision: torch.dtype, *, needs_scale: bool) -> View:
        """Prepare an observation. needs_scale: whether the objective depends on the length of the update."""
        broken = first_non_finite(seen.update.tensors)
        if broken is not None:
            raise UsageError(f"expected a finite update, got NaN or infinity in {broken!r}; it cannot be matched")
        _check_names(seen)
        notes = [] if seen.mode else ["batch normalisation in training mode"]
        mode = seen.mode or "train"
        model = batch_statistics(seen.model) if mode == "train" else seen.model
        frozen = {name: tensor for name, tensor in model.named_parameters() if name not in seen.broadcast.params}
        trainer = Trainer(model, seen.local_training or LocalTraining(), seen.task, mode=mode)
        view = View(
            trainer=trainer,
            params=cast(seen.broadcast.params, precision),
            buffers=cast({**frozen, **seen.broadcast.buffers}, precision),
            target=cast(seen.update.tensors, precision),
            notes=tuple(notes),
            statistics=cast(sent_statistics(seen), precision),
        )
        if seen.update.kind == "gradient":
            return view
        return self.explain(view, seen.local_training, num_examples, needs_scale=needs_scale)

    @abstractmethod
    def explain(self, view: View, local: LocalTraining | None, num_examples: int, *, needs_scale: bool) -> View:
        """Complete the view of a model change. local: the client's training; None if it is not disclosed."""


@dataclass(frozen=True, kw_only=True)
class Around(Matched):
    """Match as `inner` does, after a change to its view."""

    inner: Matched

    @abstractmethod
    def changed(self, view: View, seen: Observation) -> View:
        """The view of `inner`, changed."""

    def view(self, seen: Observation, num_examples: int, precision: torch.dtype, *, needs_scale: bool) -> View:
        return self.changed(self.inner.view(seen, num_examples, precision, needs_scale=needs_scale), seen)

    def explain(self, view: View, local: LocalTraining | None, num_examples: int, *, needs_scale: bool) -> View:
        return self.inner.explain(view, local, num_examples, needs_scale=needs_scale)


@dataclass(frozen=True, kw_only=True)
class Simulation(Matched):
    """Run the client's local training on the guess and compare the model changes.

    The client's own order of examples is unknown. Labels known as a set are put into different orders, in every epoch a
    new one, and the attack's own loss chooses (`orders.py`).
    orders: the most that are compared; 1: labels stay sorted, and all epochs have the same order.
    Reference: Geiping et al. 2020 (Inverting Gradients), section 6.
    Assumes: the client's local training, momentum, weight decay and learning rate included.
    """

    orders: int = 960

    def __post_init__(self) -> None:
        require_at_least(1, orders=self.orders)

    def explain(self, view: View, local: LocalTraining | None, num_examples: int, *, needs_scale: bool) -> View:
        if local is None:
            raise NotDisclosedError(
                "simulating a client needs 'local_training', which the threat model does not disclose; "
                "add it to knows, or match one batch (one_batch)"
            )
        per_epoch = local.steps_per_epoch(num_examples)
        starts = [local.batch_size * (number % per_epoch) for number in range(local.num_steps(num_examples))]
        steps = [
            (tuple(range(start, min(start + local.batch_size, num_examples))), local.learning_rate) for start in starts
        ]
        return replace(view, steps=steps, orders=self.orders)


@dataclass(frozen=True, kw_only=True)
class OneBatch(Matched):
    """Treat the change as one step on one batch of all examples.

    scale: "mean", the gradient is -change / (learning rate x steps); "sum", -change / learning rate (AGIC). A
    scale-free objective does not distinguish them.
    Reference: Xu et al. 2022 (AGIC), equation 4; the mean as in Geng et al. 2021.
    Assumes: parameters that hardly move in a round, plain SGD. If the local training is not disclosed the scale is
    unknown, and the objective must be scale-free.
    """

    scale: Literal["mean", "sum"] = "mean"

    def explain(self, view: View, local: LocalTraining | None, num_examples: int, *, needs_scale: bool) -> View:
        notes = [*view.notes, "one local step on one batch of all examples"]
        if local is None:
            if needs_scale:
                raise NotDisclosedError(
                    "this objective needs the size of the gradient, and so 'local_training', which the threat model "
                    "does not disclose; add it to knows, or use a cosine objective"
                )
            factor, notes = -1.0, [*notes, "learning rate and number of steps unknown: direction only"]
        else:
            steps = local.num_steps(num_examples) if self.scale == "mean" else 1
            factor = -1.0 / (local.learning_rate * steps)
        return replace(view, target={name: factor * tensor for name, tensor in view.target.items()}, notes=tuple(notes))


def taken(tensor: Tensor, places: tuple[int, ...]) -> Tensor:
    """The rows with these indices; for all rows in order, the tensor itself, which saves a copy."""
    return tensor if places == tuple(range(len(tensor))) else tensor[list(places)]


def cast(tensors: Params, precision: torch.dtype) -> dict[str, Tensor]:
    """Copies of the tensors, floating-point ones in `precision`."""
    return {
        name: tensor.detach().to(precision, copy=True) if tensor.is_floating_point() else tensor.detach().clone()
        for name, tensor in tensors.items()
    }


def _check_names(seen: Observation) -> None:
    for name, tensor in seen.update.tensors.items():
        known = seen.broadcast.params.get(name)
        if known is None or known.shape != tensor.shape:
            got = "no such parameter" if known is None else f"{sides(known.shape)}"
            raise UsageError(
                f"expected an update of the model, got {name!r} of shape {sides(tensor.shape)}, of which the model has "
                f"{got}"
            )
