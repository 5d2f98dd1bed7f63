"""Every message between server and clients, and every field that leaves a client.

A server sends `Train`, `Evaluate` and `Ask`; a client answers with `Trained`, `Evaluated`, `Answered` or `Declined`,
and sends nothing else. `LEAVES` lists what is in an answer, when and why; docs/messages.md is this list in words. What
a client measures about itself (times, losses, reports of its defense) stays with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from leaktight.core.protocols import Question
from leaktight.core.types import Broadcast, State, Update, UpdateKind


@dataclass(frozen=True)
class Train:
    """Train on the model sent and answer with an update of the given kind."""

    broadcast: Broadcast
    learning_rate: float
    kind: UpdateKind = "delta"
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Evaluate:
    """Score the model sent, with the client's private parts in it, on its validation examples or a common test set."""

    broadcast: Broadcast
    on: Literal["validation", "test"] = "validation"


@dataclass(frozen=True)
class Ask:
    """A question of the server's side of a method to its counterpart at the client."""

    question: Question
    to: Literal["aggregator", "defense"]


@dataclass(frozen=True)
class Trained:
    """The answer to `Train`."""

    update: Update


@dataclass(frozen=True)
class Evaluated:
    """The answer to `Evaluate`: sums, so that those of several clients add up exactly."""

    num_examples: int
    num_correct: int
    loss_sum: float

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_examples

    @property
    def loss(self) -> float:
        return self.loss_sum / self.num_examples

    def __add__(self, other: Evaluated) -> Evaluated:
        return Evaluated(
            self.num_examples + other.num_examples,
            self.num_correct + other.num_correct,
            self.loss_sum + other.loss_sum,
        )


@dataclass(frozen=True)
class Answered:
    """The answer to `Ask`: the fields that the method lists for this kind of question."""

    payload: State


@dataclass(frozen=True)
class Declined:
    """The client does not answer, whatever the reason: a refusal looks like a fault, and tells nothing."""


@dataclass(frozen=True)
class Failed:
    """Not a message: why the server has no answer of a client, in the server's own words."""

    reason: str


Request: TypeAlias = Train | Evaluate | Ask
Reply: TypeAlias = Trained | Evaluated | Answered | Declined
Outcome: TypeAlias = Reply | Failed


class Listed(NamedTuple):
    """A field that leaves a client: when it does, and why."""

    when: str
    why: str


LEAVES: Mapping[type, Mapping[str, Listed]] = {
    Trained: {"update": Listed("always", "the answer itself; its fields are those of Update")},
    Update: {
        "tensors": Listed("always", "what is trained for, as the defense lets it out; empty where it is encrypted"),
        "kind": Listed("always", "whether these are gradients or changes"),
        "num_examples": Listed("if the aggregator needs it", "the client's weight; counts as public"),
        "buffers": Listed("if the model has any", "batch statistics, without which the model cannot be used"),
        "metrics": Listed("those that the aggregator needs", "the training loss, by which FedBoosting weighs clients"),
        "sealed": Listed("if the aggregator encrypts", "tensors and buffers that the server cannot read"),
    },
    Evaluated: {
        "num_examples": Listed("if clients agreed to score models", "the weight of the score"),
        "num_correct": Listed("if clients agreed to score models", "the accuracy of the global model"),
        "loss_sum": Listed("if clients agreed to score models", "the loss of the global model"),
    },
    Answered: {"payload": Listed("if the kind of question was agreed on", "the fields listed for that kind")},
    Declined: {},
}
"""All that leaves a client, by message."""


def why_declined(outcome: Outcome) -> str:
    """The reason that a server can give for an answer it cannot use."""
    if isinstance(outcome, Failed):
        return outcome.reason
    if isinstance(outcome, Declined):
        return "the client declined; its own log says why"
    return f"answered with {type(outcome).__name__}"
