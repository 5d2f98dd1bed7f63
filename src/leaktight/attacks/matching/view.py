"""What is matched: which quantity the attacker computes from its guess, and what it is compared with.

A gradient update is compared with the gradient of the guess. A model change after several local steps is either
simulated, step by step, by the clients' own routine (`fl.local.local_update`), or taken for the gradient of one batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from leaktight.core.errors import NotDisclosedError, UsageError
from leaktight.core.protocols import Defense, RoundPlan
from leaktight.core.rng import Rng
from leaktight.core.tensors import first_non_finite
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, Params, Update
from leaktight.fl.local import Trainer, local_update, loss_and_gradient, silent
from leaktight.models.surgery import batch_statistics, mode_of

_NO_RNG = Rng(0)  # an attacker's model of a defense draws nothing


@dataclass(frozen=True)
class Unknown:
    """Something of the client's, beside its examples, that is searched for: start + spread N(0, 1) at first."""

    start: Tensor
    spread: float = 0.0

    def draw(self, rng: Rng) -> Tensor:
        """Where a restart begins."""
        noise = torch.randn(self.start.shape, generator=rng.public(), dtype=torch.float64)
        return self.start + self.spread * noise.to(self.start)


@dataclass(frozen=True)
class View:
    """One observed update in a form that can be matched.

    trainer: with the attacker's own model of a defense, if it has one: hooks that are pure functions of tensors.
    buffers: with the parameters that are not trained. target: what the guess has to come close to.
    steps: for every simulated step the places of its examples among those behind the update, and its learning rate;
    empty where the gradient of all of them is matched. notes: what the attacker assumed.
    weights: factors on the entries of guess and target before they are compared; 1 for a tensor that is not named.
    unknowns: what is searched for beside the images. One with the name of a buffer takes that buffer's place; all of
    them are the state of the trainer's defense.
    annealed: buffers that fall in equal factors from one value to another as the search goes on.
    """

    trainer: Trainer
    params: Params
    buffers: Params
    target: Params
    steps: Sequence[tuple[tuple[int, ...], float]] = ()
    notes: Sequence[str] = field(default_factory=tuple)
    weights: Params = field(default_factory=dict)
    unknowns: Mapping[str, Unknown] = field(default_factory=dict)
    annealed: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def guess(
        self, images: Tensor, labels: Tensor, params: Params, buffers: Params, unknowns: Params | None = None
    ) -> Params:
        """The update that these examples would have caused: a pure function of tensors."""
        state = unknowns or {}
        buffers = {name: state.get(name, tensor) for name, tensor in buffers.items()} if state else buffers
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
        """The buffers when so much of the search is done, a 0-d tensor; None: at its end. buffers: those of the end."""
        if share is None or not self.annealed:
            return buffers
        moving = {name: first * (share * math.log(last / first)).exp() for name, (first, last) in self.annealed.items()}
        return {**buffers, **moving}

    @property
    def precision(self) -> torch.dtype:
        """Of the attacker's computations."""
        return next(iter(self.params.values())).dtype

    @property
    def starts(self) -> Params:
        """The middle of where the unknowns begin."""
        return {name: unknown.start for name, unknown in self.unknowns.items()}

    def weighted(self, tensors: Params, weights: Params) -> Params:
        """The tensors as they are compared. weights: those of the view, as the search holds them."""
        if not weights:
            return tensors
        return {name: tensor * weights[name] if name in weights else tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Evidence:
    """What is to be explained, and by what: `num_examples` images of `shape`, with these labels if they are known.

    views: each with a weight, and the places of its examples among all.
    """

    views: Sequence[tuple[float, View, tuple[int, ...]]]
    labels: Tensor | None
    num_examples: int
    shape: tuple[int, ...]
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class Matched(ABC):
    """A way to explain an update by examples."""

    def view(self, seen: Observation, num_examples: int, precision: torch.dtype, *, needs_scale: bool) -> View:
        """Prepare an observation. needs_scale: whether the objective tells a gradient from a multiple of it."""
        broken = first_non_finite(seen.update.tensors)
        if broken is not None:
            raise UsageError(f"the observed update of {broken!r} is not finite; there is nothing to match")
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
        )
        if seen.update.kind == "gradient":
            return view
        return self.explain(view, seen.local_training, num_examples, needs_scale=needs_scale)

    @abstractmethod
    def explain(self, view: View, local: LocalTraining | None, num_examples: int, *, needs_scale: bool) -> View:
        """Complete the view of a model change."""


@dataclass(frozen=True, kw_only=True)
class Around(Matched):
    """Match as `inner` does, with its view changed."""

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
    """Repeat the client's local training on the guess and compare the changes.

    Batches are taken in a fixed order, the same in every epoch; the client's own order is unknown.
    Reference: Geiping et al. 2020 (Inverting Gradients), section 6.
    Assumes: the client's local training, momentum, weight decay and learning rate included.
    """

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
        return replace(view, steps=steps)


@dataclass(frozen=True, kw_only=True)
class OneBatch(Matched):
    """Take the change for one step on one batch of all examples.

    scale: the gradient is -change / (learning rate x steps) as the "mean" over the local steps, or
    -change / learning rate as AGIC's "sum"; the same to an objective that does not see the scale.
    Reference: Xu et al. 2022 (AGIC), equation 4; the mean as in Geng et al. 2021.
    Assumes: parameters that hardly move in a round, plain SGD. Without the local training the scale is unknown, and
    only an objective that does not see it can be used.
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
    """The rows at these places; all of them in order are the tensor itself, without a copy in every iteration."""
    return tensor if places == tuple(range(len(tensor))) else tensor[list(places)]


def cast(tensors: Params, precision: torch.dtype) -> dict[str, Tensor]:
    """Copies, floating-point ones in the attacker's precision."""
    return {
        name: tensor.detach().to(precision, copy=True) if tensor.is_floating_point() else tensor.detach().clone()
        for name, tensor in tensors.items()
    }


def _check_names(seen: Observation) -> None:
    for name, tensor in seen.update.tensors.items():
        known = seen.broadcast.params.get(name)
        if known is None or known.shape != tensor.shape:
            got = "no such parameter" if known is None else f"{tuple(known.shape)}"
            raise UsageError(
                f"the update has {name!r} of shape {tuple(tensor.shape)}, the model has {got}; "
                "they do not belong together"
            )
