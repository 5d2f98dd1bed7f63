"""The federation as values, with no transport in it. Read this file to see how a round flows.

The server side, `federate`, is a generator: it yields `{client: request}` and is sent `{client: reply}`. The client
side is `Client.handle(request, state) -> (reply, state)`. A carrier (`engines/`) moves one to the other and back.

    dataset -> partition -> Client
    server:   sample clients, Train(broadcast)         -> requests
    client:   local_update, defense                    -> Trained(update)
    server:   check, aggregate, defense.on_aggregate   -> next model, RoundOutcome
    attacker: ThreatModel.observe(trace, client)       -> Observation     (`engines.inprocess` builds the trace)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar

import torch

from leaktight.core.errors import RoundFailedError, UsageError
from leaktight.core.protocols import Aggregator, Conversation, Defense
from leaktight.core.rng import Rng
from leaktight.core.tensors import add, first_non_finite, num_bytes
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Params, State, Update
from leaktight.fl.aggregators import weighted_mean
from leaktight.fl.client import Answered, Ask, Evaluate, Evaluated, Failed, Reply, Request, Train, Trained

_SHOWN_FAILURES = 2

T = TypeVar("T")
Exchange: TypeAlias = Generator[Mapping[str, Request], Mapping[str, Reply], T]


@dataclass(frozen=True, kw_only=True)
class FederationPlan:
    """How a federation runs: how many rounds, how many clients in each, and how few may answer.

    per_round: clients drawn in each round (None: all).
    min_clients: a round in which fewer answer fails (None: all that were drawn).
    evaluate: where the global model is scored: on the "server"'s test set or on the "clients"' validation examples.
        With a defense whose private parts the model needs, every client scores the server's test set with its own.
    evaluate_every: score after every so many rounds, and always after the last.
    """

    rounds: int = 10
    per_round: int | None = None
    min_clients: int | None = None
    evaluate: Literal["server", "clients"] = "server"
    evaluate_every: int = 1

    def __post_init__(self) -> None:
        for name in ("rounds", "per_round", "min_clients", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        if self.per_round and self.min_clients and self.min_clients > self.per_round:
            raise ValueError(f"expected min_clients <= per_round, got {self.min_clients} > {self.per_round}")

    def scores_round(self, round_index: int) -> bool:
        return (round_index + 1) % self.evaluate_every == 0 or round_index + 1 == self.rounds


@dataclass(frozen=True)
class Server:
    """What the server knows from the start. sizes: training examples by client.

    drawn: the clients of every round, where they are not left to chance.
    """

    sizes: Mapping[str, int]
    aggregator: Aggregator
    local: LocalTraining
    plan: FederationPlan
    rng: Rng
    defense: Defense = Defense()
    drawn: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        drawn = self.plan.per_round or len(self.sizes)
        if drawn > len(self.sizes):
            raise UsageError(f"expected per_round <= clients, got per_round {drawn} > {len(self.sizes)} clients")
        if (self.plan.min_clients or 0) > drawn:
            raise UsageError(f"expected min_clients <= clients, got {self.plan.min_clients} > {drawn}")
        smallest = min(self.sizes, key=self.sizes.__getitem__)
        if self.local.batch_size > self.sizes[smallest]:
            raise UsageError(
                f"expected batch_size <= each client's examples, got batch_size {self.local.batch_size} > "
                f"{self.sizes[smallest]} of {smallest}; lower local.batch_size or give clients more data"
            )
        if self.aggregator.update_kind == "gradient" and self.local.num_steps(max(self.sizes.values())) != 1:
            raise UsageError(
                "a gradient update is one local step; set local.steps = 1, or choose an aggregator of model changes"
            )


@dataclass(frozen=True)
class ServerState:
    """What the server remembers from round to round; `round` is the next one to play."""

    params: Params
    buffers: Params
    aggregator: State
    defense: State = field(default_factory=dict)
    round: int = 0
    agreed: bool = False


@dataclass(frozen=True)
class RoundOutcome:
    """A finished round. change: what was added to the parameters. failures: the reason by client."""

    broadcast: Broadcast
    updates: Mapping[str, Update]
    reports: Mapping[str, Mapping[str, float]]
    failures: Mapping[str, str]
    change: Params
    learning_rate: float
    score: Evaluated | None
    state: ServerState

    @property
    def bytes_down(self) -> int:
        one = num_bytes(self.broadcast.params) + num_bytes(self.broadcast.buffers)
        return one * (len(self.updates) + len(self.failures))

    @property
    def bytes_up(self) -> int:
        return sum(num_bytes(update.tensors) + num_bytes(update.buffers or {}) for update in self.updates.values())


def initial_state(server: Server, params: Params, buffers: Params) -> ServerState:
    return ServerState(params, buffers, server.aggregator.start(params))


def federate(
    server: Server,
    state: ServerState,
    *,
    evaluate: Callable[[Params, Params], Evaluated] | None,
    after_round: Callable[[RoundOutcome], None],
    until: int | None = None,
) -> Exchange[ServerState]:
    """Play all rounds from `state` on, or those before `until`.

    evaluate: scores a model on the server's test set; None: nothing is scored, at the clients neither.
    """
    if not state.agreed:
        yield from _converse(server.defense.agree(sorted(server.sizes)), "defense")
        state = replace(state, agreed=True)
    last = server.plan.rounds if until is None else min(until, server.plan.rounds)
    while state.round < last:
        outcome = yield from play_round(server, state)
        state = outcome.state
        if evaluate is not None and server.plan.scores_round(outcome.broadcast.round):
            outcome = replace(outcome, score=(yield from _score(server, state, evaluate)))
        after_round(outcome)
    return state


def play_round(server: Server, state: ServerState) -> Exchange[RoundOutcome]:
    """One round: ask the drawn clients to train, combine what they send."""
    broadcast = Broadcast(state.params, state.buffers, state.round)
    learning_rate = server.local.learning_rate * server.local.schedule.factor(state.round, server.plan.rounds)
    everyone = list(server.sizes.values())
    drawn = draw_clients(server, state.round)
    replies = yield {
        client: Train(
            broadcast,
            learning_rate,
            server.aggregator.update_kind,
            server.aggregator.loss_scale(server.sizes[client], everyone),
        )
        for client in drawn
    }
    trained, failures = _accept(replies, drawn, broadcast, server.aggregator.update_kind)
    needed = server.plan.min_clients or len(drawn)
    if len(trained) < needed:
        first = "; ".join(f"{client}: {reason}" for client, reason in list(failures.items())[:_SHOWN_FAILURES])
        rest = f"; and {len(failures) - _SHOWN_FAILURES} more" if len(failures) > _SHOWN_FAILURES else ""
        raise RoundFailedError(
            f"round {state.round + 1}: expected {needed} updates, got {len(trained)} of {len(drawn)} ({first}{rest})"
        )
    updates = {client: reply.update for client, reply in trained.items()}
    change, memory = yield from _converse(server.aggregator.aggregate(updates, state.aggregator), "aggregator")
    change, defense = server.defense.on_aggregate(change, len(updates), state.defense)
    following = replace(
        state,
        params=add(state.params, change),
        buffers={**state.buffers, **_mean_buffers(updates)},
        aggregator=memory,
        defense=defense,
        round=state.round + 1,
    )
    reports = {client: reply.report for client, reply in trained.items()}
    return RoundOutcome(broadcast, updates, reports, failures, change, learning_rate, None, following)


def draw_clients(server: Server, round_index: int) -> list[str]:
    """The clients of a round, sorted: those named, all of them, or a sample without replacement."""
    names = sorted(server.sizes)
    if server.drawn is not None:
        return sorted(server.drawn)
    if server.plan.per_round is None:
        return names
    order = torch.randperm(len(names), generator=server.rng.child("round", round_index, "draw").torch())
    return sorted(names[place] for place in order[: server.plan.per_round].tolist())


def why_malformed(update: Update, broadcast: Broadcast, kind: str) -> str | None:
    """Why an update must not be aggregated, or None. Withheld names are fine, unknown ones are not."""
    if update.kind != kind:
        return f"expected a {kind}, got a {update.kind}"
    for tensors, known in ((update.tensors, broadcast.params), (update.buffers or {}, broadcast.buffers)):
        for name, tensor in tensors.items():
            if name not in known:
                return f"unknown name {name!r}"
            if tensor.shape != known[name].shape or tensor.dtype != known[name].dtype:
                expected, got = known[name], tensor
                return (
                    f"{name!r}: expected {tuple(expected.shape)} of {expected.dtype}, "
                    f"got {tuple(got.shape)} of {got.dtype}"
                )
        broken = first_non_finite(tensors)
        if broken is not None:
            return f"{broken!r} is not finite"
    return None if update.tensors else "the update is empty"


def _accept(
    replies: Mapping[str, Reply], drawn: list[str], broadcast: Broadcast, kind: str
) -> tuple[dict[str, Trained], dict[str, str]]:
    trained: dict[str, Trained] = {}
    failures: dict[str, str] = {}
    for client in drawn:
        reply = replies.get(client, Failed("no answer"))
        if isinstance(reply, Trained):
            reason = why_malformed(reply.update, broadcast, kind)
            if reason is None:
                trained[client] = reply
                continue
        else:
            reason = reply.reason if isinstance(reply, Failed) else f"answered with {type(reply).__name__}"
        failures[client] = reason
    return trained, failures


def _score(server: Server, state: ServerState, evaluate: Callable[[Params, Params], Evaluated]) -> Exchange[Evaluated]:
    if server.plan.evaluate == "server" and not server.defense.private_parts:
        return evaluate(state.params, state.buffers)
    broadcast = Broadcast(state.params, state.buffers, state.round)
    request = Evaluate(broadcast, "test" if server.plan.evaluate == "server" else "validation")
    replies = yield dict.fromkeys(sorted(server.sizes), request)
    scores = [reply for _, reply in sorted(replies.items()) if isinstance(reply, Evaluated)]
    if not scores:
        raise RoundFailedError(f"round {state.round}: no client could evaluate the model")
    return sum(scores[1:], scores[0])


def _converse(conversation: Conversation[T], to: Literal["aggregator", "defense"]) -> Exchange[T]:
    """Carry a method's questions to the clients; a client that does not answer fails the round."""
    try:
        questions = next(conversation)
        while True:
            replies = yield {client: Ask(question, to) for client, question in questions.items()}
            answers = {}
            for client in sorted(questions):
                reply = replies.get(client, Failed("no answer"))
                if not isinstance(reply, Answered):
                    reason = reply.reason if isinstance(reply, Failed) else f"answered with {type(reply).__name__}"
                    raise RoundFailedError(f"{client} did not answer {questions[client].kind!r}: {reason}")
                answers[client] = reply.payload
            questions = conversation.send(answers)
    except StopIteration as end:
        result: T = end.value
        return result


def _mean_buffers(updates: Mapping[str, Update]) -> Params:
    sent = {client: update.buffers for client, update in updates.items() if update.buffers is not None}
    return weighted_mean(sent, {client: float(updates[client].num_examples or 1) for client in sent})
