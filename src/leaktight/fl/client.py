"""A client: private data, private state, and answers to the server's requests."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from leaktight.core.devices import CPU, moved, working_on
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.faults import raise_fault
from leaktight.core.protocols import PROBED, ClientFacts, Guard, Member, Report, RoundPlan, Sight
from leaktight.core.rng import Rng, secret_model
from leaktight.core.tensors import buffers_of, cloned, digest, first_non_finite, parameters_of
from leaktight.core.types import Batch, Broadcast, Examples, Params, State, Truth, Update
from leaktight.fl.consent import Agreement, request_digest
from leaktight.fl.local import LocalResult, Meter, Trainer, evaluate, local_update, plan_batches, silent, timed
from leaktight.fl.messages import Answered, Ask, Evaluate, Evaluated, Reply, Request, Train, Trained
from leaktight.fl.plan import Setup
from leaktight.fl.state import ClientState


@dataclass(frozen=True)
class ClientRound:
    """One client's round; only `trained` leaves the client.

    truth: returns what was trained on. report: what the client measured about itself, by name.
    """

    trained: Trained
    truth: Callable[[], Truth]
    state: ClientState
    report: Mapping[str, float]


@dataclass(frozen=True)
class Client:
    """One client. Its state (None before the first request) is kept by the engine that delivers the requests.

    setup: shared by server and clients. agreement: which requests the client answers; every request is checked.
    returns: how often the client went back to answer a round anew (`gone_back`); its noise is then another one.
    All secrets of a round are drawn from a stream that depends on the round, the request and the client's own data and
    settings (`brings`), so that none is drawn twice.

    With a defense that provides differential privacy, no batch statistics are sent, the guard gets none of the client's
    images, and training that fails or overflows counts as no change, so that the presence of an answer reveals nothing.
    """

    name: str
    train: Examples
    validation: Examples
    setup: Setup
    rng: Rng
    test: Examples | None = None
    guard: Guard | None = None
    agreement: Agreement = Agreement()
    returns: int = 0

    def __post_init__(self) -> None:
        self.setup.check_counted(self.agreement.scores_on)

    @property
    def trainer(self) -> Trainer:
        return self.setup.trainer

    @property
    def brings(self) -> str:
        """A hash of the client's name, data, defense and local training."""
        trainer = self.trainer
        kept = () if trainer.local.redraw else ("kept",)
        total = hashlib.sha256(repr((self.name, trainer.defense, trainer.local, trainer.mode, *kept)).encode())
        total.update(digest({"images": self.train.inputs, "targets": self.train.targets}).encode())
        return total.hexdigest()

    @property
    def facts(self) -> ClientFacts:
        kinds = {str(target) for target in self.train.targets.tolist()}
        return ClientFacts(self.name, len(self.train), len(kinds))

    def handle(self, request: Request, state: ClientState | None) -> tuple[Reply, ClientState]:
        """Answer one request, or raise an error, for which the engine sends `Declined`."""
        if isinstance(request, Train):
            done = self.train_round(request, state)
            return done.trained, done.state
        trainer, state = self._begin(state)
        state = self._admitted(request, state)
        if isinstance(request, Evaluate):
            return self._score(trainer, request, state), state
        return self._answer(request, trainer, state)

    def marked(self, request: Request, state: ClientState | None) -> ClientState:
        """The state after a request that was admitted but could not be answered, so that it is not admitted again.

        `RefusedError` if it is not admitted.
        """
        return self._admitted(request, self._begin(None)[1] if state is None else state)

    def gone_back(self, before: ClientState | None, latest: ClientState) -> ClientState:
        """The state before an earlier request, to answer it anew; what the client has spent since stays spent.

        before: the state then; None before the first request. latest: the state of now.
        """
        return (before or self._begin(None)[1]).with_spent(latest)

    def train_round(self, request: Train, state: ClientState | None) -> ClientRound:
        """One round of local training: check the request, train, apply the defense, keep what is private."""
        start, report = time.perf_counter(), Meter()
        trainer, state = self._begin(state, report)
        state = self._admitted(request, state)
        here, asked = self.rng.child("round", request.broadcast.round), self._digest_of(request)
        rng = here.child("defense", asked)
        first = self.rng.child("round", 0, "batches")
        chosen, steps = plan_batches(len(self.train), trainer.local, rng=here.child("batches"), first=first)
        sight = self._sight(chosen[torch.cat(steps).unique()], here.child("guard", asked))
        trainer, state = self._receive(request.broadcast, trainer, state, sight, report)
        plan, device = self._plan(request, len(steps)), self.setup.device
        trainer, memory, (params, buffers) = moved((trainer, state.defense, _own(request.broadcast, state)), device)
        with timed(report):
            plan, memory = trainer.defense.on_round(plan, memory, rng=rng.child("round"), report=report)
        batches = (moved(self.train.batch(chosen[step]), device) for step in steps)
        with secret_model(here.child("model", asked)), working_on(device):
            result = _trained(trainer, params, buffers, batches, plan, memory, rng=rng, report=report)
        update, memory = self._defended(request, result, params, len(chosen), rng=rng, report=report)
        update, memory, result = moved((update, memory, result), CPU)
        kept = {name: tensor for name, tensor in result.params.items() if name not in update.tensors}
        state = replace(
            state, defense=memory, params=kept, buffers=_withheld(result.buffers, update, request.broadcast)
        )
        loss = float(result.losses.mean())
        del result, kept  # parameters and gradient of a large model: encryption needs the memory
        if self.guard is not None:
            state = replace(state, guard=self.guard.after(update, request.broadcast, state.guard))
        update, memory = self.setup.aggregator.on_update(
            update,
            state.aggregator,
            self._member(trainer, state, rng=here.child("member", asked)),
            broadcast=request.broadcast,
            rng=here.child("aggregator", asked),
        )
        measured = {"loss": loss, "seconds": time.perf_counter() - start}
        return ClientRound(
            Trained(self._needed(update)),
            lambda: Truth(self.train.batch(chosen), steps, plan.learning_rates),
            replace(state, aggregator=memory),
            {**report.figures(), **measured, "steps": float(len(steps))},
        )

    def _plan(self, request: Train, steps: int) -> RoundPlan:
        rates = (request.learning_rate,) * steps
        epoch = self.trainer.local.steps_per_epoch(len(self.train))
        return RoundPlan(request.broadcast.round, rates, request.loss_scale, epoch)

    def _digest_of(self, request: Train) -> str:
        sent = request.broadcast
        brings = f"{self.brings}|{self.returns}" if self.returns else self.brings
        return request_digest(sent.params, sent.buffers, request.learning_rate, request.loss_scale, brings)

    def _stream(self, *path: str | int) -> Rng:
        """The random stream of a question or a score, another one after the client went back."""
        return self.rng.child(*path, *(("returns", self.returns) if self.returns else ()))

    def _defended(
        self, request: Train, result: LocalResult, params: Params, count: int, *, rng: Rng, report: Report
    ) -> tuple[Update, State]:
        """The update after the defense, and the defense's state. count: number of examples used."""
        sent, defense = request.broadcast, self.setup.defense
        update = Update(
            tensors=_shared(result.update(params, request.kind), sent.params),
            kind=request.kind,
            num_examples=count,
            buffers=None if defense.private else _shared(result.buffers, sent.buffers),
        )
        if defense.private and first_non_finite(update.tensors) is not None:
            update = replace(update, tensors={name: torch.zeros_like(each) for name, each in update.tensors.items()})
        with timed(report):
            update, memory = defense.on_update(
                update, result.state, rng=rng.child("update", request.kind), report=report
            )
        name = first_non_finite(update.tensors) or first_non_finite(update.buffers or {})
        if name is not None:
            raise LeaktightError(
                f"the update of {name!r} is not finite; nothing was sent; lower local.learning_rate or check the data"
            )
        self.agreement.check_budget(defense, memory)
        return update, memory

    def _admitted(self, request: Request, state: ClientState) -> ClientState:
        """The state with this request recorded; `RefusedError` if it must not be answered."""
        return replace(state, conduct=self.agreement.admit(request, state.conduct, self.setup))

    def _needed(self, update: Update) -> Update:
        """The update without what the aggregator does not need."""
        needs = self.setup.aggregator.needs
        return replace(
            update,
            num_examples=update.num_examples if "num_examples" in needs else None,
            metrics={name: value for name, value in update.metrics.items() if name in needs},
        )

    def _answer(self, request: Ask, trainer: Trainer, state: ClientState) -> tuple[Answered, ClientState]:
        question, setup = request.question, self.setup
        rng = self._stream("ask", request.to, question.kind)
        if request.to == "aggregator":
            member = self._member(trainer, state, rng=rng.child("member"))
            answer, memory = setup.aggregator.answer(question, state.aggregator, member, rng=rng)
            listed, state = setup.aggregator.questions, replace(state, aggregator=memory)
        else:
            answer, memory = setup.defense.answer(question, state.defense, self.facts, rng=rng)
            listed, state = setup.defense.questions, replace(state, defense=memory)
        fields = listed[question.kind.partition("/")[0]].answer
        if set(answer) != set(fields):
            raise LeaktightError(
                f"expected the listed fields in the answer to {question.kind!r}, got others; nothing was sent"
            )
        return Answered(answer), state

    def _begin(self, state: ClientState | None, report: Report = silent) -> tuple[Trainer, ClientState]:
        """The client's own network, and its state, which is created at the first request."""
        model, facts = copy.deepcopy(self.trainer.model), self.facts
        with timed(report):
            model, memory = self.trainer.defense.start(model, facts, rng=self.rng.child("defense", "start"))
        trainer = replace(self.trainer, model=model)
        if state is not None:
            return trainer, state
        return trainer, ClientState(
            defense=memory,
            params=cloned(_gained(parameters_of(model), parameters_of(self.trainer.model))),
            buffers=cloned(_gained(buffers_of(model), buffers_of(self.trainer.model))),
        )

    def _receive(
        self, broadcast: Broadcast, trainer: Trainer, state: ClientState, sight: Sight, report: Report
    ) -> tuple[Trainer, ClientState]:
        """Let the guard check what the server sent; then use the network of the server, if it sent one."""
        if self.guard is not None:
            with secret_model(sight.rng.child("model")):
                memory = self.guard.admit(broadcast, self.trainer.model, sight, state.guard, report=report)
            state = replace(state, guard=memory)
        if broadcast.model is None:
            return trainer, state
        model = copy.deepcopy(broadcast.model)
        model, _ = self.trainer.defense.start(model, self.facts, rng=self.rng.child("defense", "start"))
        return replace(trainer, model=model), state

    def _sight(self, used: Tensor, rng: Rng) -> Sight:
        """What the guard may use. used: the examples of the round; none of them beside a promise of privacy."""
        hidden = self.trainer.defense.private
        return Sight(
            inputs=self.train.example,
            rng=rng,
            examples=None if hidden or self.guard is None else self.train.batch(used[:PROBED]),
            task=self.trainer.task,
            mode=self.trainer.mode,
            share=self.agreement.share,
        )

    def _score(self, trainer: Trainer, request: Evaluate, state: ClientState) -> Evaluated:
        examples = self.validation if request.on == "validation" else self.test
        if examples is None:
            raise LeaktightError(f"{self.name} has no test set; score on validation examples")
        if self.guard is not None:
            self.guard.admit(request.broadcast, self.trainer.model, None, state.guard, report=silent)
        params, buffers = _own(request.broadcast, state)
        with secret_model(self._stream("score", request.broadcast.round)):
            return evaluate(trainer, params, buffers, examples, device=self.setup.device)

    def _member(self, trainer: Trainer, state: ClientState, *, rng: Rng) -> Member:
        """What the client's side of the aggregator may use of this client."""

        def mean_loss(model: Params, statistics: Params, on: Literal["train", "validation"]) -> float:
            examples = self.train if on == "train" else self.validation
            if not len(examples):
                raise LeaktightError(
                    f"{self.name} has no {on} examples to score a model on; raise partition.validation"
                )
            with secret_model(rng.child("loss", on)):
                params, buffers = {**model, **state.params}, {**statistics, **state.buffers}
                return evaluate(trainer, params, buffers, examples, device=self.setup.device).loss

        def applied(change: Params) -> Params:
            return trainer.defense.on_aggregate(change, 1, {})[0]

        return Member(self.name, mean_loss, applied, self.agreement.clients)


def _trained(
    trainer: Trainer,
    params: Params,
    buffers: Params,
    batches: Iterable[Batch],
    plan: RoundPlan,
    memory: State,
    *,
    rng: Rng,
    report: Report,
) -> LocalResult:
    """Local training. With a private defense, whose noise comes later, training that fails counts as no change."""
    try:
        return local_update(
            trainer,
            params,
            buffers,
            batches,
            learning_rates=plan.learning_rates,
            loss_scale=plan.loss_scale,
            round_index=plan.round,
            state=memory,
            rng=rng,
            report=report,
        )
    except LeaktightError as error:
        raise_fault(error)
        if not trainer.defense.private or isinstance(error, UsageError):
            raise
        nothing = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        return LocalResult(dict(params), dict(buffers), nothing, torch.zeros(1), memory)


def _own(broadcast: Broadcast, state: ClientState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The received model with the client's private parts in place of the server's."""
    return {**broadcast.params, **state.params}, {**broadcast.buffers, **state.buffers}


def _gained(tensors: Params, known: Params) -> Params:
    return {name: tensor for name, tensor in tensors.items() if name not in known}


def _shared(tensors: Params, known: Params) -> dict[str, Tensor]:
    """The tensors that the server knows by name; the others were added by the defense and never leave the client."""
    return {name: tensor for name, tensor in tensors.items() if name in known}


def _withheld(buffers: Params, update: Update, broadcast: Broadcast) -> Params:
    """The buffers that stay with the client; if no statistics are sent, the server's are used in the next round."""
    return _gained(buffers, broadcast.buffers if update.buffers is None else update.buffers)
