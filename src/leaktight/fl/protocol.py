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

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from leaktight.core.errors import RoundFailedError, UsageError
from leaktight.core.protocols import Aggregator, Conversation, Defense
from leaktight.core.rng import Rng
from leaktight.core.tensors import add, first_non_finite, flatten_state, num_bytes
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Params, State, Update
from leaktight.fl.aggregators import weighted_mean
from leaktight.fl.consent import check_counted
from leaktight.fl.messages import (
    Answered,
    Ask,
    Evaluate,
    Evaluated,
    Failed,
    Outcome,
    Request,
    Train,
    Trained,
    why_declined,
)

LARGEST_VALUE = 1e6
"""An update with a number beyond this is left out: no training step is so large, and a few would drown all others."""

_SHOWN_FAILURES = 2

T = TypeVar("T")
Exchange: TypeAlias = Generator[Mapping[str, Request], Mapping[str, Outcome], T]


@dataclass(frozen=True, kw_only=True)
class FederationPlan:
    """How a federation runs: how many rounds, how many clients in each, and how few may answer.

    per_round: clients drawn in each round (None: all).
    min_clients: a round in which fewer answer fails (None: all that were drawn).
    evaluate: where the global model is scored: on the "server"'s test set or on the "clients"' validation examples.
        With a defense whose private parts the model needs, every client scores the server's test set with its own.
    evaluate_every: score after every so many rounds, and always after the last.
    timeout: seconds to wait for answers where clients are elsewhere (Flower); who has not answered by then has failed.
        None: for ever.
    """

    rounds: int = 10
    per_round: int | None = None
    min_clients: int | None = None
    evaluate: Literal["server", "clients"] = "server"
    evaluate_every: int = 1
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(f"expected timeout > 0 seconds, got {self.timeout}")
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
    network: what a malicious server hands out in place of the network that was agreed on.
    """

    sizes: Mapping[str, int]
    aggregator: Aggregator
    local: LocalTraining
    plan: FederationPlan
    rng: Rng
    defense: Defense = Defense()
    drawn: tuple[str, ...] | None = None
    network: nn.Module | None = None

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
        check_counted(self.defense, self.aggregator, self.scores_on)

    @property
    def scores_on(self) -> Literal["validation", "test"] | None:
        """On which examples clients score the global model; None where the server does it alone."""
        if self.plan.evaluate == "clients":
            return "validation"
        return "test" if self.defense.private_parts else None


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
        return sum(
            num_bytes(update.tensors)
            + num_bytes(update.buffers or {})
            + num_bytes(flatten_state(update.sealed or {})[0])
            for update in self.updates.values()
        )


def initial_state(server: Server, params: Params, buffers: Params) -> ServerState:
    return ServerState(params, buffers, server.aggregator.start(params))


def carry(conversation: Exchange[T], exchange: Callable[[Mapping[str, Request]], Mapping[str, Outcome]]) -> T:
    """Hold a whole conversation, with `exchange` to move requests to the clients and their replies back."""
    try:
        requests = next(conversation)
        while True:
            requests = conversation.send(exchange(requests))
    except StopIteration as end:
        result: T = end.value
        return result


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
        names = sorted(server.sizes)
        yield from _converse(server.defense.agree(names), "defense")
        memory = yield from _converse(server.aggregator.agree(names, state.aggregator), "aggregator")
        state = replace(state, aggregator=memory, agreed=True)
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
    broadcast = Broadcast(state.params, state.buffers, state.round, server.network)
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
    trained, failures = _accept(replies, drawn, broadcast, server)
    needed = server.plan.min_clients or len(drawn)
    if len(trained) < needed:
        first = "; ".join(f"{client}: {reason}" for client, reason in list(failures.items())[:_SHOWN_FAILURES])
        rest = f"; and {len(failures) - _SHOWN_FAILURES} more" if len(failures) > _SHOWN_FAILURES else ""
        raise RoundFailedError(
            f"round {state.round + 1}: expected {needed} updates, got {len(trained)} of {len(drawn)} ({first}{rest})"
        )
    updates = {client: reply.update for client, reply in trained.items()}
    rng = server.rng.child("round", state.round, "aggregate")
    combined, memory = yield from _converse(
        server.aggregator.aggregate(updates, state.aggregator, broadcast=broadcast, rng=rng), "aggregator"
    )
    change: Params = {name: tensor for name, tensor in combined.items() if name in state.params}
    change, defense = server.defense.on_aggregate(change, len(updates), state.defense)
    statistics = {name: state.buffers[name] + tensor for name, tensor in combined.items() if name in state.buffers}
    params, buffers = add(state.params, change), {**state.buffers, **_mean_buffers(updates), **statistics}
    broken = first_non_finite(params) or first_non_finite(buffers)
    if broken is not None:
        raise RoundFailedError(f"round {state.round + 1}: {broken!r} of the next model is not finite; nothing was kept")
    following = replace(
        state,
        params=params,
        buffers=buffers,
        aggregator=memory,
        defense=defense,
        round=state.round + 1,
    )
    return RoundOutcome(broadcast, updates, failures, change, learning_rate, None, following)


def draw_clients(server: Server, round_index: int) -> list[str]:
    """The clients of a round, sorted: those named, all of them, or a sample without replacement."""
    names = sorted(server.sizes)
    if server.drawn is not None:
        return sorted(server.drawn)
    if server.plan.per_round is None:
        return names
    order = torch.randperm(len(names), generator=server.rng.child("round", round_index, "draw").public())
    return sorted(names[place] for place in order[: server.plan.per_round].tolist())


def why_malformed(
    update: Update, broadcast: Broadcast, kind: str, most_examples: int | None = None, *, sealed: bool = False
) -> str | None:
    """Why an update must not be aggregated, or None. Withheld names are fine, unknown ones are not.

    most_examples: the client has no more of them, so it cannot weigh more. Nothing is taken on trust: an update may
    come from anybody.
    """
    if update.kind != kind:
        return f"expected a {kind}, got a {update.kind!s:.40}"
    if sealed != isinstance(update.sealed, Mapping) or (sealed and update.tensors):
        return f"expected {'an encrypted' if sealed else 'a plain'} update, got another"
    parts: tuple[Any, Any] = update.tensors, {} if update.buffers is None else update.buffers
    if not all(isinstance(part, Mapping) for part in parts):
        return "expected tensors by name, got something else"
    for tensors, known in zip(parts, (broadcast.params, broadcast.buffers), strict=True):
        for name, tensor in tensors.items():
            reason = _why_not_like(name, tensor, known)
            if reason is not None:
                return reason
    if not update.tensors and not sealed:
        return "the update is empty"
    count, most = update.num_examples, math.inf if most_examples is None else most_examples
    if count is not None and (type(count) is not int or not 0 <= count <= most):
        return f"expected at most {most} examples, got {count!r:.40}"
    return None if _are_figures(update.metrics) else "expected metrics to be finite numbers by name"


def _why_not_like(name: Any, tensor: Any, known: Params) -> str | None:
    if name not in known:
        return f"unknown name {name!r:.80}"
    expected = known[name]
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return f"{name!r}: expected a tensor, got {type(tensor).__name__}"
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        return (
            f"{name!r}: expected {tuple(expected.shape)} of {expected.dtype}, "
            f"got {tuple(tensor.shape)} of {tensor.dtype}"
        )
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    largest = float(tensor.abs().max())
    if not math.isfinite(largest):
        return f"{name!r} is not finite"
    return f"{name!r} has a value of {largest:.3g}, beyond {LARGEST_VALUE:.0e}" if largest > LARGEST_VALUE else None


def _are_figures(figures: Any) -> bool:
    """Whether these are numbers by name, as clients report them."""
    return isinstance(figures, Mapping) and all(
        isinstance(name, str) and isinstance(value, float | int) and math.isfinite(value)
        for name, value in figures.items()
    )


def _why_unfit(reply: Trained, broadcast: Broadcast, aggregator: Aggregator, most_examples: int) -> str | None:
    update: Any = reply.update  # it may come from anybody
    if not isinstance(update, Update):
        return "expected an update, got something else"
    return why_malformed(update, broadcast, aggregator.update_kind, most_examples, sealed=aggregator.sealed)


def _accept(
    replies: Mapping[str, Outcome], drawn: list[str], broadcast: Broadcast, server: Server
) -> tuple[dict[str, Trained], dict[str, str]]:
    """The updates that may be combined, and why the others may not."""
    trained: dict[str, Trained] = {}
    failures: dict[str, str] = {}
    for client in drawn:
        reply = replies.get(client, Failed("no answer"))
        if isinstance(reply, Trained):
            reason = _why_unfit(reply, broadcast, server.aggregator, server.sizes[client])
            if reason is None:
                trained[client] = reply
                continue
        else:
            reason = why_declined(reply)
        failures[client] = reason
    return trained, failures


def _is_score(reply: Outcome) -> bool:
    """Whether a client's score can be one: it may come from anybody."""
    return (
        isinstance(reply, Evaluated)
        and type(reply.num_examples) is int
        and type(reply.num_correct) is int
        and 0 <= reply.num_correct <= reply.num_examples
        and reply.num_examples > 0
        and isinstance(reply.loss_sum, float | int)
        and math.isfinite(reply.loss_sum)
    )


def _score(server: Server, state: ServerState, evaluate: Callable[[Params, Params], Evaluated]) -> Exchange[Evaluated]:
    if server.scores_on is None:
        return evaluate(state.params, state.buffers)
    request = Evaluate(Broadcast(state.params, state.buffers, state.round), server.scores_on)
    replies = yield dict.fromkeys(sorted(server.sizes), request)
    scores = [reply for _, reply in sorted(replies.items()) if isinstance(reply, Evaluated) and _is_score(reply)]
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
                    kind, reason = questions[client].kind, why_declined(reply)
                    raise RoundFailedError(f"{client} did not answer {kind!r}: {reason}")
                answers[client] = reply.payload
            questions = conversation.send(answers)
    except StopIteration as end:
        result: T = end.value
        return result


def _mean_buffers(updates: Mapping[str, Update]) -> Params:
    sent = {client: update.buffers for client, update in updates.items() if update.buffers is not None}
    return weighted_mean(sent, {client: float(updates[client].num_examples or 1) for client in sent})
