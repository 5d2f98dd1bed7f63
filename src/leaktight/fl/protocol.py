"""The protocol of a federation, without transport. Start here to see what happens in a round.

The server side, `federate`, is a generator: it yields `{client: request}` and is sent `{client: reply}`. The client
side is `Client.handle(request, state) -> (reply, state)`. An engine (`engines/`) delivers requests and replies.

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

from leaktight.core.errors import RoundFailedError, UnusableError
from leaktight.core.protocols import Conversation, Question
from leaktight.core.tensors import add, first_non_finite, flatten_state, num_bytes
from leaktight.core.types import Broadcast, Params, State, Update
from leaktight.fl.accept import Accepted, Seen, accepted, is_score, why_not_listed
from leaktight.fl.messages import (
    Answered,
    Ask,
    Evaluate,
    Evaluated,
    Failed,
    Outcome,
    Request,
    Train,
    why_declined,
)
from leaktight.fl.plan import Server, Setup

_SHOWN_FAILURES = 2

T = TypeVar("T")
Exchange: TypeAlias = Generator[Mapping[str, Request], Mapping[str, Outcome], T]


@dataclass(frozen=True)
class ServerState:
    """The server's state between rounds. round: the next one to run. agreed: whether `agree` has run.

    seen: hashes of the updates of earlier rounds, by which a replay is recognised.
    """

    params: Params
    buffers: Params
    aggregator: State
    defense: State = field(default_factory=dict)
    round: int = 0
    agreed: bool = False
    seen: Seen = field(default_factory=dict)


@dataclass(frozen=True)
class RoundOutcome:
    """A finished round. change: of the parameters. failures: reasons by client. state: after the round.

    flags: what is unusual about an update that was used, by client.
    """

    broadcast: Broadcast
    updates: Mapping[str, Update]
    failures: Mapping[str, str]
    change: Params
    learning_rate: float
    score: Evaluated | None
    state: ServerState
    flags: Mapping[str, str] = field(default_factory=dict)

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
    return ServerState(params, buffers, server.setup.aggregator.start(params))


def carry(conversation: Exchange[T], exchange: Callable[[Mapping[str, Request]], Mapping[str, Outcome]]) -> T:
    """Run a conversation to its end. exchange: delivers requests and returns the replies."""
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
    """Run all rounds from `state` on, or those before `until`.

    evaluate: scores a model on the server's test set; None: no scoring at all, not even by clients.
    after_round: called with every finished round.
    """
    if not state.agreed:
        names = sorted(server.sizes)
        yield from _converse(server.setup.defense.agree(names), server.setup, "defense")
        conversation = server.setup.aggregator.agree(names, state.aggregator)
        memory = yield from _converse(conversation, server.setup, "aggregator")
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
    """One round: ask the drawn clients to train and combine their updates."""
    broadcast = Broadcast(state.params, state.buffers, state.round, server.network)
    local, aggregator = server.setup.trainer.local, server.setup.aggregator
    learning_rate = local.learning_rate * local.schedule.factor(state.round, server.plan.rounds)
    everyone = list(server.sizes.values())
    drawn = draw_clients(server, state.round)
    replies = yield {
        client: Train(
            broadcast,
            learning_rate,
            aggregator.update_kind,
            aggregator.loss_scale(server.sizes[client], everyone),
        )
        for client in drawn
    }
    used = accepted(replies, drawn, broadcast, server, state.seen)
    used, combined, memory = yield from _aggregated(server, state, broadcast, used)
    updates, failures = used.updates, used.failures
    change: Params = {name: tensor for name, tensor in combined.items() if name in state.params}
    change, defense = server.setup.defense.on_aggregate(change, len(updates), state.defense)
    statistics = {name: state.buffers[name] + tensor for name, tensor in combined.items() if name in state.buffers}
    params = add(state.params, change)
    buffers = {**state.buffers, **aggregator.combine_buffers(updates), **statistics}
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
        seen=used.seen,
    )
    return RoundOutcome(broadcast, updates, failures, change, learning_rate, None, following, used.flags)


def _aggregated(
    server: Server, state: ServerState, broadcast: Broadcast, used: Accepted
) -> Exchange[tuple[Accepted, Params, State]]:
    """The change of the model, from all updates that can be combined, and which these are."""
    rng = server.rng.child("round", state.round, "aggregate")
    while True:
        _require_enough(server, state.round, used)
        conversation = server.setup.aggregator.aggregate(used.updates, state.aggregator, broadcast=broadcast, rng=rng)
        try:
            combined, memory = yield from _converse(conversation, server.setup, "aggregator")
        except UnusableError as error:
            used = used.without(error.reasons)
        else:
            return used, combined, memory


def _require_enough(server: Server, round_index: int, used: Accepted) -> None:
    updates, failures = used.updates, used.failures
    drawn = len(updates) + len(failures)
    needed = server.plan.min_clients or drawn
    if len(updates) < needed:
        first = "; ".join(f"{client}: {reason}" for client, reason in list(failures.items())[:_SHOWN_FAILURES])
        rest = f"; and {len(failures) - _SHOWN_FAILURES} more" if len(failures) > _SHOWN_FAILURES else ""
        raise RoundFailedError(
            f"round {round_index + 1}: expected {needed} updates, got {len(updates)} of {drawn} ({first}{rest})"
        )


def draw_clients(server: Server, round_index: int) -> list[str]:
    """The clients of a round, sorted: those of `server.drawn`, all, or a sample without replacement."""
    names = sorted(server.sizes)
    if server.drawn is not None:
        return sorted(server.drawn)
    if server.plan.per_round is None:
        return names
    order = torch.randperm(len(names), generator=server.rng.child("round", round_index, "draw").public())
    return sorted(names[place] for place in order[: server.plan.per_round].tolist())


def _score(server: Server, state: ServerState, evaluate: Callable[[Params, Params], Evaluated]) -> Exchange[Evaluated]:
    if server.scores_on is None:
        return evaluate(state.params, state.buffers)
    request = Evaluate(Broadcast(state.params, state.buffers, state.round), server.scores_on)
    replies = yield dict.fromkeys(sorted(server.sizes), request)
    scores = [reply for _, reply in sorted(replies.items()) if is_score(reply)]
    if not scores:
        raise RoundFailedError(f"round {state.round}: no client could evaluate the model")
    return sum(scores[1:], scores[0])


def _converse(conversation: Conversation[T], setup: Setup, to: Literal["aggregator", "defense"]) -> Exchange[T]:
    """Send a method's questions to the clients; the round fails if a client does not answer."""
    listed = setup.aggregator.questions if to == "aggregator" else setup.defense.questions
    try:
        questions = next(conversation)
        while True:
            replies = yield {client: Ask(question, to) for client, question in questions.items()}
            answers = {}
            for client in sorted(questions):
                reply = replies.get(client, Failed("no answer"))
                kind = questions[client].kind
                if not isinstance(reply, Answered):
                    raise RoundFailedError(f"{client} did not answer {kind!r}: {why_declined(reply)}")
                reason = why_not_listed(reply.payload, listed.get(kind.partition("/")[0]))
                if reason is not None:
                    raise RoundFailedError(f"{client} did not answer {kind!r}: {reason}")
                answers[client] = reply.payload
            questions = _next_questions(conversation, answers)
    except StopIteration as end:
        result: T = end.value
        return result


def _next_questions(conversation: Conversation[T], answers: Mapping[str, State]) -> Mapping[str, Question]:
    """What a method asks after these answers, which may be anything; the round fails if it cannot use them."""
    try:
        return conversation.send(answers)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        senders = ", ".join(sorted(answers)[:_SHOWN_FAILURES]) + (", ..." if len(answers) > _SHOWN_FAILURES else "")
        raise RoundFailedError(f"the answers of {senders} cannot be used ({type(error).__name__})") from error
