"""Interfaces of defenses, aggregators, attacks, guards and metrics. Every hook of a base class is the identity.

A hook takes a value and the state, and returns both; it never changes its inputs. `rng` is the hook's own random
stream, `report(name, value)` records figures about the method.

The order of a defense's hooks in a round is fixed: `on_round` once; then per local step `on_batch`, the gradient,
`on_gradient`, the optimiser's step; then `on_update` once. On the server, `on_aggregate` sees the combined change
before it is applied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.inputs import ALL_INPUTS, ONLY_IMAGES, Inputs, require_inputs
from leaktight.core.privacy import Spent
from leaktight.core.rng import Rng
from leaktight.core.tasks import Classification, Task
from leaktight.core.tensors import weighted_mean
from leaktight.core.threat import Knowledge
from leaktight.core.types import (
    Batch,
    Broadcast,
    Earlier,
    Mode,
    Observation,
    Params,
    Protection,
    Reconstruction,
    State,
    Update,
    UpdateKind,
)

Report: TypeAlias = Callable[[str, float], None]
Progress: TypeAlias = Callable[[int, float, Tensor | None], None]

LabelSource: TypeAlias = Literal["given", "inferred", "searched", "not needed"]
"""Where the labels of a guess come from: the threat model, a rule, the search itself."""

T = TypeVar("T")

MANY = 2**31
"""More clients than any federation has: no limit."""


@dataclass(frozen=True)
class Question:
    """A question of the server's side of a method to a client, outside training; `kind` names it."""

    kind: str
    payload: State


Questions: TypeAlias = Mapping[str, Question]
Answers: TypeAlias = Mapping[str, State]
Conversation: TypeAlias = Generator[Questions, Answers, T]
"""The server's side of a method that asks clients: it yields questions by client, receives the answers by client,
sorted by name, and returns its result. `yield from` runs it inside another conversation."""


@dataclass(frozen=True)
class Asked:
    """A kind of question that clients answer.

    why: the purpose of the answer. answer: the names of its fields. each_round: answered once in every round that the
    client trained in, with "/" and the number of the round after the kind; otherwise once in a run.
    exact: whether the answer has unprotected figures of the client's data.
    """

    why: str
    answer: tuple[str, ...] = ()
    each_round: bool = False
    exact: bool = False


@dataclass(frozen=True)
class ClientFacts:
    """Facts about a client's data, which it does not send."""

    client: str
    num_examples: int
    num_classes: int


@dataclass(frozen=True)
class Member:
    """A client, for the client's side of an aggregator.

    mean_loss: of a model (parameters, buffers) on the client's "train" or "validation" examples, in evaluation mode,
    with the client's private parts in place of the given ones.
    applied: maps a client's change to the change of the global parameters, if it were the only one, including the
    server's side of the defense. peers: the number of clients, if it was agreed on.
    """

    name: str
    mean_loss: Callable[[Params, Params, Literal["train", "validation"]], float]
    applied: Callable[[Params], Params] = dict
    peers: int = MANY


@dataclass(frozen=True)
class RoundPlan:
    """The plan of a client's round: the learning rate of each local step, and the server's factor on its loss.

    steps_per_epoch: the steps between two uses of an example; None if unknown.
    """

    round: int
    learning_rates: tuple[float, ...]
    loss_scale: float = 1.0
    steps_per_epoch: int | None = None


def _no_loss(params: Params, batch: Batch) -> Tensor:
    raise LeaktightError("this step was made without a loss function; give Step a loss")


@dataclass(frozen=True)
class Step:
    """One local step, for a defense.

    index: 0 for the first step of the round. gradient: of the mean loss of the batch, by parameter name.
    per_example: computes the gradient of each example, (N, *shape) by name.
    loss: the mean loss of any batch under any parameters, differentiable in both; it does not change batch-norm
    statistics.
    """

    index: int
    round: int
    model: nn.Module
    params: Params
    buffers: Params
    batch: Batch
    gradient: Params
    learning_rate: float | Tensor
    per_example: Callable[[], Params]
    loss: Callable[[Params, Batch], Tensor] = _no_loss


@dataclass(frozen=True)
class Defense(Protection):
    """No defense: every hook is the identity. A subclass has its settings as fields, and its memory in `state`."""

    @property
    def takes(self) -> frozenset[type[Inputs]]:
        """The kinds of input that it works on."""
        return ALL_INPUTS

    @property
    def private_parts(self) -> bool:
        """Whether the model needs private parts of the clients, so that only clients can evaluate it."""
        return False

    @property
    def private(self) -> bool:
        """Whether it is differentially private, so that nothing else about the data may be sent."""
        return False

    @property
    def needs_mean(self) -> str | None:
        """Why the server has to combine updates by their mean; None if another rule will do."""
        return None

    @property
    def questions(self) -> Mapping[str, Asked]:
        """The kinds of questions that `agree` asks and `answer` answers."""
        return {}

    def spent(self, state: State) -> Spent | None:
        """The privacy budget that a client with this state has spent, this round included; None if not counted."""
        return None

    def prepare(self, model: nn.Module, *, rng: Rng) -> nn.Module:
        """Change the shared network, once per federation, before the first broadcast.

        Added parameters are sent like all others.
        """
        return model

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        """Wrap the model and create the state (keys, moments), once per client. Added parameters are private."""
        return model, {}

    def agree(self, clients: Sequence[str]) -> Conversation[None]:
        """The server's side of an agreement before the first round (sums, keys)."""
        yield from ()

    def answer(self, question: Question, state: State, facts: ClientFacts, *, rng: Rng) -> tuple[State, State]:
        """A client's answer to one of `agree`'s questions, and its new state."""
        raise ValueError(f"{type(self).__name__} has no answer to {question.kind!r}")

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        return plan, state

    def on_batch(self, batch: Batch, state: State, *, rng: Rng, report: Report) -> tuple[Batch, State]:
        return batch, state

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        return step.gradient, state

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        return update, state

    def on_aggregate(self, change: Params, num_clients: int, state: State) -> tuple[Params, State]:
        return change, state


@dataclass(frozen=True)
class Aggregator:
    """Combines updates into the next model. Subclasses define `combine`, or `aggregate` if they ask clients.

    `on_update` and `answer` run at the clients, with the client's state; the other methods with the server's.
    """

    @property
    def update_kind(self) -> UpdateKind:
        """The kind of update that clients send."""
        return "delta"

    @property
    def needs(self) -> frozenset[str]:
        """Further values that clients send: "num_examples", "training_loss". Others are not sent."""
        return frozenset()

    @property
    def questions(self) -> Mapping[str, Asked]:
        """The kinds of questions that `agree` and `aggregate` ask and `answer` answers."""
        return {}

    @property
    def sealed(self) -> bool:
        """Whether updates are encrypted; the server then refuses plain ones."""
        return False

    def start(self, params: Params) -> State:
        """The server's state before the first round."""
        return {}

    def agree(self, clients: Sequence[str], state: State) -> Conversation[State]:
        """The server's side of an agreement before the first round (keys). Returns its new state."""
        yield from ()
        return state

    def loss_scale(self, num_examples: int, all_examples: Sequence[int]) -> float:
        """The factor on the loss of a client with `num_examples`, among clients with `all_examples`."""
        return 1.0

    def on_update(
        self, update: Update, state: State, member: Member, *, broadcast: Broadcast, rng: Rng
    ) -> tuple[Update, State]:
        """The update that leaves the client, from the defended one. broadcast: the model that it is based on."""
        return update, state

    def combine(self, updates: Mapping[str, Update], state: State) -> tuple[Params, State]:
        """The change of the global parameters, by name, and the new state."""
        raise ValueError(f"{type(self).__name__} defines neither combine nor aggregate")

    def aggregate(
        self, updates: Mapping[str, Update], state: State, *, broadcast: Broadcast, rng: Rng
    ) -> Conversation[tuple[Params, State]]:
        """As `combine`, with questions to the clients. It may also return changes of buffers."""
        yield from ()
        return self.combine(updates, state)

    def combine_buffers(self, updates: Mapping[str, Update]) -> Params:
        """The next buffers (batch statistics) by name, but for those whose change `aggregate` returns.

        Their mean, weighted by the number of examples.
        """
        sent = {client: update.buffers for client, update in updates.items() if update.buffers is not None}
        return weighted_mean(sent, {client: float(updates[client].num_examples or 1) for client in sent})

    def why_too_few(self, clients: int) -> str | None:
        """Why it cannot combine the updates of a round of this many clients; None if it can."""
        return None

    def answer(self, question: Question, state: State, member: Member, *, rng: Rng) -> tuple[State, State]:
        """A client's answer to one of the questions of `agree` or `aggregate`, and its new state."""
        raise ValueError(f"{type(self).__name__} has no answer to {question.kind!r}")


@dataclass(frozen=True)
class Attack(ABC):
    """Turns what was seen into a guess. Settings are the fields of the subclass, data come at call time.

    A subclass has to write `reconstruct` alone; the rest is what an audit asks of an attack.
    """

    @property
    def takes(self) -> frozenset[type[Inputs]]:
        """The kinds of input that it can find."""
        return ONLY_IMAGES

    @property
    def requires(self) -> frozenset[Knowledge]:
        """The facts without which it cannot run."""
        return frozenset()

    @property
    def labels_from(self) -> LabelSource:
        """How it comes by the labels of its guess."""
        return "not needed"

    @property
    def searches(self) -> bool:
        """Whether it minimises a loss of its own, so that a loss that does not fall is a failure."""
        return True

    @property
    def joins_rounds(self) -> bool:
        """Whether it makes one guess from several updates of the same examples; others are given the last one alone."""
        return False

    @property
    def needs_rounds(self) -> int | None:
        """The number of updates that it has to be given at once; None: as many as there are."""
        return None

    def pinned(self, *, onednn: bool) -> Self:
        """The attack with everything fixed that would otherwise depend on the machine, such as timed choices.

        onednn: whether to use the convolutions of oneDNN, where that is left open.
        """
        return self

    def fitted(self, seen: Observation) -> Self:
        """The attack with settings that fit this observation (labels, local steps), where its own leave them open."""
        return self

    @abstractmethod
    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        """The guess. seen: updates of the same examples, mostly one.

        progress: called with the iteration, the loss and the best guess so far, or None; it must change nothing.
        """


def require_seen(attack: Attack, seen: Sequence[Observation]) -> Observation:
    """The first of what was seen; an error unless there is one and all show inputs that the attack takes."""
    if not seen:
        raise UsageError("expected at least one observation, got none")
    for each in seen:
        require_inputs(type(attack).__name__, attack.takes, each.inputs)
    return seen[0]


def follow(attack: Attack, rounds: Sequence[Sequence[Observation]], *, rng: Rng) -> list[Reconstruction]:
    """The guesses of an attack for successive rounds of one client, each with other examples.

    rounds: for each round its updates, mostly one. Those of a later round are given with the earlier ones and the
    guesses for them.
    """
    found: list[Reconstruction] = []
    earlier: tuple[Earlier, ...] = ()
    for place, seen in enumerate(rounds):
        shown = [replace(each, earlier=earlier) for each in seen]
        found.append(attack.reconstruct(shown, rng=rng.child("watched", place)))
        guess, number = found[-1].guess, seen[0].batch_size
        kept = Batch(guess.inputs[:number], guess.targets[:number])
        earlier = (*earlier, *(Earlier(each, kept) for each in seen))
    return found


@dataclass(frozen=True)
class ActiveAttack(Attack):
    """A malicious server: it may also change what it sends, and ask again. `reconstruct` is given all that came back.

    Every query is a round like any other, so that defenses and guards meet it.
    """

    @abstractmethod
    def tamper(self, broadcast: Broadcast, seen: Sequence[Observation], *, rng: Rng) -> Broadcast | None:
        """What to send next; None when enough was seen. The first call must not return None.

        broadcast: what an honest server would send now, with the network in `model`. An answer with another network in
        `model` hands that out to the clients. seen: the answers to the queries so far.
        """


PROBED = 64
"""The most examples that a guard looks at."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a guard may use of its client's round.

    inputs: what one example is, None if that is not known. examples: the first of those that the client is about to
    train on; None if nothing may depend on them. share: the part of the clients that is drawn in a round, by the plan.
    rng: a secret stream.
    """

    inputs: Inputs | None
    rng: Rng
    examples: Batch | None = None
    task: Task = Classification()
    mode: Mode = "train"
    share: float = 1.0


class Guard(Protocol):
    """A client's check of the model that it received, before training on it."""

    def admit(
        self, broadcast: Broadcast, model: nn.Module, sight: Sight | None, state: State, *, report: Report
    ) -> State:
        """The guard's new state, or `RefusedError`. Nothing is sent to the server.

        model: the network that was agreed on. sight: None for a model that is scored and not trained on.
        """
        ...

    def after(self, update: Update, broadcast: Broadcast, state: State) -> State:
        """The guard's state after the client's own update of that model."""
        ...


class Metric(Protocol):
    """A score of each guess against its truth: two tensors (N, C, H, W) in [0, 1] to (N,).

    leaks_when: whether a high or a low score means that the guess is close to the truth.
    """

    name: str
    leaks_when: Literal["high", "low"]

    def __call__(self, guess: Tensor, truth: Tensor) -> torch.Tensor: ...
