"""Every message between server and clients, every field that leaves a client, and messages as bytes.

A server sends `Train`, `Evaluate` and `Ask`; a client answers with `Trained`, `Evaluated`, `Answered` or `Declined`,
and sends nothing else. `LEAVES` lists the fields of an answer, when each is sent and why; docs/messages.md explains the
list. What a client measures about itself (times, losses, reports of its defense) stays with it.

>>> decode(encode({"reply": Evaluated(10, 9, 2.5), "round": 3}))
{'reply': Evaluated(num_examples=10, num_correct=9, loss_sum=2.5), 'round': 3}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from leaktight.core.errors import LeaktightError
from leaktight.core.protocols import Question
from leaktight.core.tensors import pack, unpack
from leaktight.core.text import printable
from leaktight.core.types import Batch, Broadcast, State, Truth, Update, UpdateKind
from leaktight.fl.limits import Limits


@dataclass(frozen=True)
class Train:
    """Train the model sent and answer with an update of this kind."""

    broadcast: Broadcast
    learning_rate: float
    kind: UpdateKind = "delta"
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Evaluate:
    """Score the model sent, with the client's private parts, on its validation examples or the common test set."""

    broadcast: Broadcast
    on: Literal["validation", "test"] = "validation"


@dataclass(frozen=True)
class Ask:
    """A question from the server's aggregator or defense to that of the client."""

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
    """The client does not answer. No reason is given, so that a refusal cannot be told from a fault."""


@dataclass(frozen=True)
class Failed:
    """Not a message: the server's reason for having no answer of a client."""

    reason: str


Request: TypeAlias = Train | Evaluate | Ask
Reply: TypeAlias = Trained | Evaluated | Answered | Declined
Outcome: TypeAlias = Reply | Failed


class Listed(NamedTuple):
    """When a field leaves a client, and why."""

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
    """The server's reason for not using an answer, as text to show: it may hold a client's words."""
    if isinstance(outcome, Failed):
        return printable(outcome.reason)
    if isinstance(outcome, Declined):
        return "the client declined; its own log says why"
    return f"answered with {type(outcome).__name__}"


_TYPE = "__type__"
_MESSAGES: Mapping[str, type] = {
    message.__name__: message for message in (*LEAVES, Ask, Batch, Broadcast, Evaluate, Question, Train, Truth)
}


def encode(message: Mapping[str, Any]) -> bytes:
    """A mapping of messages, tensors, numbers, strings, bytes and mappings of these as bytes; pickle is not used."""
    return pack({"message": _to_plain(message)})


def decode(data: bytes, limits: Limits | None = None) -> dict[str, Any]:
    """The inverse of `encode`; LeaktightError for other or damaged bytes. limits: of bytes that somebody else sent."""
    try:
        if limits is not None:
            limits.check_bytes(data)
        plain = unpack(data)["message"]
        if limits is not None:
            limits.check_values(plain)
        message: dict[str, Any] = _from_plain(plain)
    except LeaktightError:
        raise
    except Exception as error:
        raise LeaktightError(f"not a message of this protocol ({type(error).__name__})") from error
    return message


def _to_plain(value: Any) -> Any:
    if is_dataclass(value) and type(value).__name__ in _MESSAGES:
        plain = {field.name: _to_plain(getattr(value, field.name)) for field in fields(value)}
        return {_TYPE: type(value).__name__, **plain}
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    built = {key: _from_plain(item) for key, item in value.items()}
    name = built.pop(_TYPE, None)
    return built if name is None else _MESSAGES[name](**built)
