"""An aggregator's whole conversation without a federation around it, and with every message on record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tests.seeds import replayed
from torch import Tensor

from leaktight.core.protocols import Aggregator, Conversation, Member, Question
from leaktight.core.types import Broadcast, Params, State, Update
from leaktight.crypto.paillier import Paillier

SMALL = Paillier(key_bits=256, unsafe_small=True)


def distance_to(goal: float) -> Callable[[Params, Params, Literal["train", "validation"]], float]:
    """A loss with no network behind it: how far the parameters are from a number, on average and squared."""

    def mean_loss(params: Params, buffers: Params, on: Literal["train", "validation"]) -> float:
        values = torch.cat([tensor.double().flatten() for tensor in params.values()])
        return float((values - goal).square().mean())

    return mean_loss


@dataclass
class Talk:
    """Clients with their aggregator memories. asked: every question, in order; said: every answer.

    sent: the updates of the last round; change: what was made of them.
    """

    aggregator: Aggregator
    members: Mapping[str, Member]
    seed: int = 0
    states: dict[str, State] = field(default_factory=dict)
    asked: list[tuple[str, Question]] = field(default_factory=list)
    said: list[tuple[str, State]] = field(default_factory=list)
    sent: dict[str, Update] = field(default_factory=dict)
    change: Params = field(default_factory=dict)
    before: Callable[[str, Question], Question] = lambda client, question: question
    after: Callable[[str, Question, State], State] = lambda client, question, answer: answer

    def agreed(self, params: Params) -> State:
        state: State = self._hold(self.aggregator.agree(sorted(self.members), self.aggregator.start(params)))
        return state

    def round(self, updates: Mapping[str, Update], state: State, broadcast: Broadcast) -> tuple[Params, State]:
        self.sent = {name: self.seal(name, update, broadcast) for name, update in sorted(updates.items())}
        self.change, state = self.combine(self.sent, state, broadcast)
        return self.change, state

    def combine(self, sent: Mapping[str, Update], state: State, broadcast: Broadcast) -> tuple[Params, State]:
        rng = replayed(self.seed).child("server", broadcast.round)
        change, state = self._hold(self.aggregator.aggregate(sent, state, broadcast=broadcast, rng=rng))
        return change, state

    def seal(self, name: str, update: Update, broadcast: Broadcast) -> Update:
        sent, self.states[name] = self.aggregator.on_update(
            update,
            self.states.get(name, {}),
            self.members[name],
            broadcast=broadcast,
            rng=replayed(self.seed).child(name, "round", broadcast.round),
        )
        return sent

    def _hold(self, conversation: Conversation[Any]) -> Any:
        answers: Mapping[str, State] | None = None
        while True:
            try:
                questions = next(conversation) if answers is None else conversation.send(answers)
            except StopIteration as end:
                return end.value
            answers = {name: self.ask(name, question) for name, question in sorted(questions.items())}

    def ask(self, name: str, question: Question) -> State:
        self.asked.append((name, question))
        answer, self.states[name] = self.aggregator.answer(
            self.before(name, question),
            self.states.get(name, {}),
            self.members[name],
            rng=replayed(self.seed).child(name, question.kind),
        )
        answer = self.after(name, question, answer)
        self.said.append((name, answer))
        return answer


def talk_of(aggregator: Aggregator, clients: int = 3, seed: int = 0) -> Talk:
    names = [f"c{place}" for place in range(clients)]
    members = {name: Member(name, distance_to(0.1 * place)) for place, name in enumerate(names)}
    return Talk(aggregator, members, seed)


def broadcast_of(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Broadcast:
    generator = replayed(seed).child("broadcast").public()
    return Broadcast(
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}, {}, 4
    )


def updates_of(broadcast: Broadcast, sizes: Mapping[str, int], seed: int = 0, bound: float = 1.0) -> dict[str, Update]:
    def draw(name: str, tensor: Tensor, client: str) -> Tensor:
        generator = replayed(seed).child("update", client, name).public()
        return bound * (2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1)

    return {
        client: Update({name: draw(name, tensor, client) for name, tensor in broadcast.params.items()}, "delta", size)
        for client, size in sizes.items()
    }


def flat(tensors: Params) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])
