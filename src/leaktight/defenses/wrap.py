"""A defense in your own PyTorch training loop."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.privacy import Spent
from leaktight.core.protocols import ClientFacts, Defense, Question, RoundPlan, Step
from leaktight.core.rng import ModelSecrets, Rng, SecretPasses
from leaktight.core.tasks import Classification, Penalised, Task, example_losses
from leaktight.core.tensors import buffers_of, cloned, first_non_finite, parameters_of
from leaktight.core.text import as_written
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
    """A client with a defense, for your own training loop. `model` is copied; train `.model` of the result.

    The server's model is `defense.prepare(model, rng=Rng.fresh())`, which is `model` unless the defense changes the
    shared network; `receive` its tensors before the first round.
    num_examples, num_classes: of this client's training data. client: its name in the federation.
    task: the loss of one example. Train on `.loss(outputs, targets)`, the mean over the batch with the penalty of the
    defense, or on your own loss if it is the same number.
    state: the `state_dict()` of an earlier process. rng: fresh entropy by default; give one only in tests.
    """
    return Defended(defense, model, ClientFacts(client, num_examples, num_classes), task, state, rng or Rng.fresh())


class Defended:
    """One client's model with its defense. In every round: `receive`, `start_round`, steps, `finish_round`.

    Parameters that the defense adds to the model or leaves out of the update are private: `receive` does not change
    them, and `state_dict` has them. A copied or unpickled client draws from a new key. With a differentially private
    defense no batch statistics are sent.
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
        self._request_hash = ""
        self._abandoned = 0
        self._ignored: dict[str, Tensor] = {}
        self._steps_per_epoch: int | None = None
        self._seen_in_epoch: set[bytes] = set()
        self._secrets = SecretPasses()
        self.model.register_forward_pre_hook(self._secrets.begin)
        self.model.register_forward_hook(self._secrets.end, always_call=True)
        if state is not None:
            self._restore(state)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "rng": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.rng = Rng.fresh()
        if self._before is not None:
            self._begin_secrets()

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the server's parameters and buffers (such as a `state_dict`) to the model, except private ones."""
        self._between_rounds()
        own = self._tensors()
        for name, tensor in tensors.items():
            if name not in own:
                raise UsageError(f"expected tensors of the model, got {name!r}; send the model's own state_dict")
            if name in self._private:
                self._ignored[name] = tensor.detach().clone()
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
        """Begin a round of `steps` local steps. Returns the learning rate of each step.

        steps_per_epoch: the steps between two uses of an example. Without it a defense that counts epsilon counts every
        step as a use of the same example. With it, an earlier second use is an error; that of an augmented example
        cannot be detected.
        loss_scale: the server's factor on the loss, which the defense may change; `loss` applies it.
        """
        self._between_rounds()
        if steps < 1:
            raise UsageError(f"expected steps >= 1, got {steps}")
        if steps_per_epoch is not None and (type(steps_per_epoch) is not int or steps_per_epoch < 1):
            raise UsageError(f"expected steps_per_epoch as a whole number >= 1, got {as_written(steps_per_epoch)}")
        self._meter, self._index, self._gradient, self._batch = Meter(), 0, {}, None
        self._before = (cloned(self._tensors()), self._memory)
        self._request_hash = self._hash_request(learning_rate, loss_scale)
        self._begin_secrets()
        self._steps_per_epoch, self._seen_in_epoch = steps_per_epoch, set()
        plan = RoundPlan(self.round, (learning_rate,) * steps, loss_scale, steps_per_epoch)
        with timed(self._meter):
            plan, self._memory = self.defense.on_round(
                plan, self._memory, rng=self._stream.child("round"), report=self._meter
            )
        self.loss_scale, self._rates = plan.loss_scale, plan.learning_rates
        return plan.learning_rates

    def loss(self, outputs: Tensor | Penalised, targets: Tensor) -> Tensor:
        """The mean loss of a batch with the model's penalty, times `loss_scale`."""
        return example_losses(self.task, outputs, targets).mean() * self.loss_scale

    def batch(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The batch to train on instead of this one. Needed only with a defense that changes batches."""
        self._in_round()
        rng = self._stream.child("step", self._index, "batch")
        with timed(self._meter):
            self._batch, self._memory = self.defense.on_batch(
                Batch(inputs, targets), self._memory, rng=rng, report=self._meter
            )
        return self._batch.inputs, self._batch.targets

    def protect(self, inputs: Tensor, targets: Tensor) -> None:
        """Replace the `.grad` of every parameter by the defended gradient. Call it after `loss.backward()`."""
        self._in_round()
        if self._index >= len(self._rates):
            raise UsageError(f"expected {len(self._rates)} steps in the round, as given to start_round(), got more")
        if self._batch is None:
            self.batch(inputs, targets)
        batch = Batch(inputs, targets)
        if self._batch is None or self._batch.inputs is not inputs or self._batch.targets is not targets:
            raise UsageError(
                f"expected the batch that batch() returned, got another; {type(self.defense).__name__} changes "
                "batches: call batch() on each before the forward pass"
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
        """The update to send; nothing else may leave the client. num_examples: used in the round; default: all."""
        self._in_round()
        if self._index != len(self._rates):
            raise UsageError(
                f"expected {len(self._rates)} protected steps, as given to start_round(), got {self._index}; "
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
        """Restore the model and the state of the defense to those before the round."""
        tensors, self._memory = self._in_round()
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(tensors[name])
        self._end_round()
        self._abandoned += 1

    @property
    def spent(self) -> Spent | None:
        """The privacy budget that this client has spent so far; None if the defense does not count it."""
        return self.defense.spent(self._memory)

    def state_dict(self) -> State:
        """The private state to keep between rounds, in the format of `core.tensors.pack`. Never send it."""
        self._between_rounds()
        private = {name: tensor for name, tensor in self._tensors().items() if name in self._private}
        return {"defense": self._memory, "private": cloned(private), "round": self.round, "asked": self._asked}

    @property
    def _stream(self) -> Rng:
        """The random stream of the round, the same as in `fl.client.Client`."""
        return self.rng.child("round", self.round, "defense", self._request_hash)

    def _check_epoch(self, inputs: Tensor) -> None:
        """Raise if an example is used twice in an epoch and the privacy budget relies on that."""
        if not self.defense.private or self._steps_per_epoch is None:
            return
        if self._index % self._steps_per_epoch == 0:
            self._seen_in_epoch = set()
        rows = {hashlib.sha256(row.contiguous().numpy().tobytes()).digest() for row in inputs.detach().cpu().float()}
        if len(rows) < len(inputs) or rows & self._seen_in_epoch:
            raise UsageError(
                f"expected every example once in an epoch of {self._steps_per_epoch} steps, got one a second time; "
                "leave steps_per_epoch out of start_round(), so that every step counts as a use of it"
            )
        self._seen_in_epoch |= rows

    def _hash_request(self, learning_rate: float, loss_scale: float) -> str:
        """A hash of the server's request for this round, so that two different models never get the same noise."""
        own = {**self._tensors(), **self._ignored}
        params, buffers = ({name: own[name] for name in names} for names in (self._shared_params, self._shared_buffers))
        return request_digest(params, buffers, learning_rate, loss_scale, self._round_identity)

    @property
    def _round_identity(self) -> str:
        """What distinguishes this client's rounds: its name, its defense, and the number of abandoned rounds."""
        return repr((self.facts.client, self.defense, self._abandoned))

    def _begin_secrets(self) -> None:
        self._secrets.source = ModelSecrets(self.rng.child("round", self.round, "model", self._request_hash))

    def _end_round(self) -> None:
        self._before = self._secrets.source = None

    def _tensors(self) -> dict[str, Tensor]:
        return {**parameters_of(self.model), **buffers_of(self.model)}

    def _in_round(self) -> tuple[Params, State]:
        """All tensors and the state of the defense before the round."""
        if self._before is None:
            raise UsageError("expected a round in progress, got none; call start_round() first")
        return self._before

    def _between_rounds(self) -> None:
        if self._before is not None:
            raise UsageError("expected no round in progress, got one; call finish_round() or abandon_round() first")

    def _undefended(self, kind: UpdateKind, num_examples: int) -> Update:
        """The update of an undefended client, without parameters that the defense added to the model."""
        before, _ = self._in_round()
        params = {name: tensor for name, tensor in parameters_of(self.model).items() if name in self._shared_params}
        buffers = {name: tensor for name, tensor in buffers_of(self.model).items() if name in self._shared_buffers}
        change = {name: tensor - before[name] for name, tensor in params.items()}
        gradient = {name: self._gradient[name] for name in params}
        statistics = None if self.defense.private else cloned(buffers)
        return Update(change if kind == "delta" else gradient, kind, num_examples, statistics)

    def _step(self, batch: Batch) -> Step:
        """The step for the defense, with copies, because the optimiser and `zero_grad` write in place."""
        own = cloned(parameters_of(self.model))
        # Parameters of the defense are last, as in fl.client, so that each gets the same noise.
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
        """Mark the tensors that were not sent as private; if no statistics were sent, use the server's next."""
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
