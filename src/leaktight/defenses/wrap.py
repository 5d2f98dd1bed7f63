"""A defense in a PyTorch loop of your own: the same hooks, called around the steps that you write yourself."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.privacy import Spent
from leaktight.core.protocols import ClientFacts, Defense, Question, RoundPlan, Step
from leaktight.core.rng import ModelSecrets, Rng, SecretPasses
from leaktight.core.tasks import Classification, Task, example_losses
from leaktight.core.tensors import buffers_of, cloned, first_non_finite, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Params, State, Update, UpdateKind
from leaktight.fl.consent import request_digest
from leaktight.fl.local import Meter, Trainer, batch_loss, per_example_gradients, timed


def wrap(
    defense: Defense,
    model: nn.Module,
    *,
    num_examples: int,
    num_classes: int,
    client: str = "client",
    task: Task = Classification(),
    state: State | None = None,
    rng: Rng | None = None,
) -> Defended:
    """Put a defense around a model that you train yourself. The model given is not changed; train `.model`.

    The server holds `defense.prepare(model, rng=Rng.fresh())`, which is the model itself unless the defense changes the
    network for everybody; `receive` its tensors before the first round.
    num_examples, num_classes: of this client's training data. client: its name in the federation.
    task: the loss of one example. Train on `.loss(outputs, targets)`, its mean over the batch with what the defense
    adds to it; a loss of your own does as well where it is the same number.
    state: what `state_dict()` gave in an earlier process. rng: fresh entropy unless given; give one in tests only.
    """
    return Defended(defense, model, ClientFacts(client, num_examples, num_classes), task, state, rng or Rng.fresh())


class Defended:
    """One client's model with its defense. In every round: `receive`, `start_round`, steps, `finish_round`.

    Parameters that the defense adds to the model or leaves out of the update are private: `receive` does not touch
    them and `state_dict` keeps them. A copy, or one that was pickled, draws from a key of its own. With a defense that
    promises differential privacy no batch statistics are sent.
    """

    def __init__(
        self, defense: Defense, model: nn.Module, facts: ClientFacts, task: Task, state: State | None, rng: Rng
    ) -> None:
        self.defense, self.facts, self.task, self.rng = defense, facts, task, rng
        shared = defense.prepare(copy.deepcopy(model), rng=rng.child("defense", "prepare"))
        self._shared_params, self._shared_buffers = list(parameters_of(shared)), list(buffers_of(shared))
        self.model, self._memory = defense.start(shared, facts, rng=rng.child("defense", "start"))
        self._private = set(self._tensors()).difference(self._shared_params, self._shared_buffers)
        self.round = 0
        self.metrics: dict[str, float] = {}
        self.loss_scale = 1.0
        self._asked = 0
        self._meter = Meter()
        self._before: tuple[Params, State] | None = None
        self._rates: tuple[float, ...] = ()
        self._gradient: Params = {}
        self._index = 0
        self._batch: Batch | None = None
        self._asked_for = ""
        self._abandoned = 0
        self._told: dict[str, Tensor] = {}
        self._steps_per_epoch: int | None = None
        self._this_epoch: set[bytes] = set()
        self._secrets = SecretPasses()
        self.model.register_forward_pre_hook(self._secrets.begin)
        self.model.register_forward_hook(self._secrets.end, always_call=True)
        if state is not None:
            self._restore(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rng": None}

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held)
        self.rng = Rng.fresh()
        if self._before is not None:
            self._begin_secrets()

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the server's parameters and buffers (such as a `state_dict`), all but the private ones."""
        self._between_rounds()
        own = self._tensors()
        for name, tensor in tensors.items():
            if name not in own:
                raise UsageError(f"expected tensors of the model, got {name!r}; send the model's own state_dict")
            if name in self._private:
                self._told[name] = tensor.detach().clone()
                continue
            with torch.no_grad():
                own[name].copy_(tensor)

    def answer(self, question: Question) -> State:
        """Answer a question of the server's side of the defense (`Defense.agree`)."""
        rng = self.rng.child("ask", "defense", question.kind, self._asked)
        answer, self._memory = self.defense.answer(question, self._memory, self.facts, rng=rng)
        self._asked += 1
        return answer

    def start_round(
        self, learning_rate: float, steps: int, *, steps_per_epoch: int | None = None, loss_scale: float = 1.0
    ) -> tuple[float, ...]:
        """Begin a round of so many steps; gives the learning rate to use in each.

        steps_per_epoch: after how many steps an example may come again. Without it a defense that counts epsilon counts
        every step as a use of the same example. With it you promise that: an example that comes earlier is an error,
        but one that was changed on the way (augmented) cannot be told from another.
        loss_scale: the server's factor on the loss; `loss` applies it, or what the defense makes of it.
        """
        self._between_rounds()
        if steps < 1:
            raise UsageError(f"expected steps >= 1, got {steps}")
        if steps_per_epoch is not None and (type(steps_per_epoch) is not int or steps_per_epoch < 1):
            raise UsageError(f"expected steps_per_epoch as a whole number >= 1, got {steps_per_epoch!r}")
        self._meter, self._index, self._gradient, self._batch = Meter(), 0, {}, None
        self._before = (cloned(self._tensors()), self._memory)
        self._asked_for = self._request(learning_rate, loss_scale)
        self._begin_secrets()
        self._steps_per_epoch, self._this_epoch = steps_per_epoch, set()
        plan = RoundPlan(self.round, (learning_rate,) * steps, loss_scale, steps_per_epoch)
        with timed(self._meter):
            plan, self._memory = self.defense.on_round(
                plan, self._memory, rng=self._stream.child("round"), report=self._meter
            )
        self.loss_scale, self._rates = plan.loss_scale, plan.learning_rates
        return plan.learning_rates

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The mean loss of a batch as the defense expects it: with the model's own penalty, and scaled."""
        return example_losses(self.task, outputs, targets).mean() * self.loss_scale

    def batch(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The batch to train on in place of this one. Needed only with a defense that changes batches."""
        self._in_round()
        rng = self._stream.child("step", self._index, "batch")
        with timed(self._meter):
            self._batch, self._memory = self.defense.on_batch(
                Batch(inputs, targets), self._memory, rng=rng, report=self._meter
            )
        return self._batch.inputs, self._batch.targets

    def protect(self, inputs: Tensor, targets: Tensor) -> None:
        """After `loss.backward()`: put the defended gradient in place of every parameter's `.grad`."""
        self._in_round()
        if self._index >= len(self._rates):
            raise UsageError(f"expected {len(self._rates)} steps in the round, as start_round() was told, got more")
        if self._batch is None:
            self.batch(inputs, targets)
        batch = Batch(inputs, targets)
        if self._batch is None or self._batch.inputs is not inputs or self._batch.targets is not targets:
            raise UsageError(
                f"expected the batch that batch() gave, got another; {type(self.defense).__name__} changes batches: "
                "call batch() on each before the forward pass"
            )
        self._check_epoch(inputs)
        rng = self._stream.child("step", self._index, "gradient")
        with timed(self._meter), self._secrets.drawing():
            gradient, self._memory = self.defense.on_gradient(
                self._step(batch), self._memory, rng=rng, report=self._meter
            )
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = gradient[name].clone()
        self._gradient, self._index, self._batch = gradient, self._index + 1, None

    def finish_round(self, *, kind: UpdateKind = "delta", num_examples: int | None = None) -> Update:
        """The update to send, and all that may leave. num_examples: used in the round, unless all of them were."""
        self._in_round()
        if self._index != len(self._rates):
            raise UsageError(
                f"expected {len(self._rates)} protected steps, as start_round() was told, got {self._index}; "
                "call protect() after every backward()"
            )
        update = self._undefended(kind, self.facts.num_examples if num_examples is None else num_examples)
        with timed(self._meter):
            update, self._memory = self.defense.on_update(
                update, self._memory, rng=self._stream.child("update", kind), report=self._meter
            )
        broken = first_non_finite(update.tensors) or first_non_finite(update.buffers or {})
        if broken is not None:
            self.abandon_round()
            raise LeaktightError(
                f"the update of {broken!r} is not finite; there is nothing to send, and the model is as it was before "
                "the round; lower the learning rate or check the data"
            )
        self._end_round()
        self._keep(update)
        self.metrics = self._meter.figures()
        self.round += 1
        return update

    def abandon_round(self) -> None:
        """Put the model and the defense's memory back to where they were before the round; nothing is sent."""
        tensors, self._memory = self._in_round()
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(tensors[name])
        self._end_round()
        self._abandoned += 1

    @property
    def spent(self) -> Spent | None:
        """What the rounds so far have cost of this client's privacy; None where the defense does not count."""
        return self.defense.spent(self._memory)

    def state_dict(self) -> dict[str, Any]:
        """What this client must remember between rounds, as plain values for `core.tensors.pack`. Never send it."""
        self._between_rounds()
        private = {name: tensor for name, tensor in self._tensors().items() if name in self._private}
        return {"defense": self._memory, "private": cloned(private), "round": self.round, "asked": self._asked}

    @property
    def _stream(self) -> Rng:
        """The round's place in the tree of random streams: the one that `fl.client.Client` uses."""
        return self.rng.child("round", self.round, "defense", self._asked_for)

    def _check_epoch(self, inputs: Tensor) -> None:
        """Where a budget rests on it, see that no example comes twice in an epoch."""
        if not self.defense.private or self._steps_per_epoch is None:
            return
        if self._index % self._steps_per_epoch == 0:
            self._this_epoch = set()
        rows = {hashlib.sha256(row.contiguous().numpy().tobytes()).digest() for row in inputs.detach().cpu().float()}
        if len(rows) < len(inputs) or rows & self._this_epoch:
            raise UsageError(
                f"expected every example once in an epoch of {self._steps_per_epoch} steps, got one a second time; "
                "leave steps_per_epoch out of start_round(), so that every step counts as a use of it"
            )
        self._this_epoch |= rows

    def _request(self, learning_rate: float, loss_scale: float) -> str:
        """A hash of what the server sent for this round: two models never meet the same noise."""
        own = {**self._tensors(), **self._told}
        params, buffers = ({name: own[name] for name in names} for names in (self._shared_params, self._shared_buffers))
        return request_digest(params, buffers, learning_rate, loss_scale, self._brings)

    @property
    def _brings(self) -> str:
        """What tells this client's round from others: who it is, its defense, and how often it began a round anew."""
        return repr((self.facts.client, self.defense, self._abandoned))

    def _begin_secrets(self) -> None:
        self._secrets.source = ModelSecrets(self.rng.child("round", self.round, "model", self._asked_for))

    def _end_round(self) -> None:
        self._before = self._secrets.source = None

    def _tensors(self) -> dict[str, Tensor]:
        return {**parameters_of(self.model), **buffers_of(self.model)}

    def _in_round(self) -> tuple[Params, State]:
        """All tensors and the memory from before the round."""
        if self._before is None:
            raise UsageError("expected a round under way, got none; call start_round() first")
        return self._before

    def _between_rounds(self) -> None:
        if self._before is not None:
            raise UsageError("expected no round under way, got one; call finish_round() or abandon_round() first")

    def _undefended(self, kind: UpdateKind, num_examples: int) -> Update:
        """What an undefended client would send, without anything that the defense added to the model."""
        before, _ = self._in_round()
        params = {name: tensor for name, tensor in parameters_of(self.model).items() if name in self._shared_params}
        buffers = {name: tensor for name, tensor in buffers_of(self.model).items() if name in self._shared_buffers}
        change = {name: tensor - before[name] for name, tensor in params.items()}
        gradient = {name: self._gradient[name] for name in params}
        statistics = None if self.defense.private else cloned(buffers)
        return Update(change if kind == "delta" else gradient, kind, num_examples, statistics)

    def _step(self, batch: Batch) -> Step:
        """The step as the defense sees it: copies, because the optimiser and `zero_grad` write in place."""
        own = cloned(parameters_of(self.model))
        # What the defense added comes last, as at a client, so that draws meet the same parameters.
        params = {name: own[name] for name in dict.fromkeys([*self._shared_params, *own])}
        buffers = cloned(buffers_of(self.model))
        trainer = Trainer(
            self.model, LocalTraining(), self.task, self.defense, "train" if self.model.training else "eval"
        )
        found = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        gradient = {
            name: torch.zeros_like(tensor) if (slope := found[name]) is None else slope.detach().clone()
            for name, tensor in params.items()
        }
        return Step(
            index=self._index,
            round=self.round,
            model=self.model,
            params=params,
            buffers=buffers,
            batch=batch,
            gradient=gradient,
            learning_rate=self._rates[self._index],
            per_example=partial(per_example_gradients, trainer, params, buffers, batch, self.loss_scale),
            loss=partial(batch_loss, trainer, buffers, self.loss_scale),
        )

    def _keep(self, update: Update) -> None:
        """What did not go out stays here; where no statistics were sent at all, the server's are used next."""
        sent = self._shared_buffers if update.buffers is None else update.buffers
        self._private = {
            *(name for name in parameters_of(self.model) if name not in update.tensors),
            *(name for name in buffers_of(self.model) if name not in sent),
        }

    def _restore(self, state: State) -> None:
        own = self._tensors()
        unknown = [name for name in state["private"] if name not in own]
        if unknown:
            raise UsageError(f"expected the state of this model and defense, got {unknown[0]!r}, which the model lacks")
        with torch.no_grad():
            for name, tensor in state["private"].items():
                own[name].copy_(tensor)
        self._memory, self._private = state["defense"], set(state["private"])
        self.round, self._asked = state["round"], state["asked"]
