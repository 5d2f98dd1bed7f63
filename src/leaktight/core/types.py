"""The values of a federation. All are immutable; their tensors are never written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from torch import Tensor, nn

from leaktight.core.errors import DataError
from leaktight.core.inputs import Images, Inputs
from leaktight.core.tasks import Task
from leaktight.core.training import LocalTraining

Params = Mapping[str, Tensor]
"""Tensors by parameter name, in the order of the model."""

State = Mapping[str, Any]
"""The state of a defense or an aggregator: nested mappings of tensors, numbers, strings, bytes and None."""

UpdateKind = Literal["gradient", "delta"]

Mode = Literal["train", "eval"]
"""The mode of batch normalisation and dropout."""


@dataclass(frozen=True)
class Batch:
    """Examples as a model takes them: inputs (N, ...), images (N, C, H, W) in [0, 1]; targets as the task has them."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


class HiddenBatch(Batch):
    """A batch that a defense must not read: every access raises `error`, but for the length if `size` is given."""

    _error: Exception
    _size: int | None

    def __init__(self, error: Exception, size: int | None = None) -> None:
        self.__dict__.update(_error=error, _size=size)  # a batch is frozen

    def __len__(self) -> int:
        if self._size is None:
            raise self._error
        return self._size

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error


@dataclass(frozen=True)
class Examples:
    """Stored examples: inputs (N, ...) as their kind stores them (images: bytes), targets as the task has them.

    kind: what the examples are.
    """

    inputs: Tensor
    targets: Tensor
    kind: type[Inputs] = Images

    def __post_init__(self) -> None:
        self.kind.of(self.inputs)
        if len(self.inputs) != len(self.targets):
            raise DataError(
                f"expected one target per example, got {len(self.inputs)} examples, {len(self.targets)} targets"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def example(self) -> Inputs:
        """What one of them is."""
        return self.kind.of(self.inputs)

    def take(self, indices: Tensor) -> Examples:
        return Examples(self.inputs[indices], self.targets[indices], self.kind)

    def part(self, start: int, stop: int) -> Examples:
        """A range of the examples, without copying them."""
        return Examples(self.inputs[start:stop], self.targets[start:stop], self.kind)

    def batch(self, indices: Tensor | slice = slice(None)) -> Batch:
        return Batch(self.example.loaded(self.inputs[indices]), self.targets[indices])


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to a client at the start of a round.

    model: a network that a malicious server sends in place of the one agreed on; None for an honest server. It cannot
    leave the process.
    """

    params: Params
    buffers: Params
    round: int
    model: nn.Module | None = None


@dataclass(frozen=True)
class Update:
    """Everything that leaves a client in a round.

    tensors: by parameter name; a defense may withhold names or replace values.
    kind: "gradient" of one batch, or "delta", the local parameters minus those received.
    num_examples: the number of examples used; None if the aggregator does not need it or a defense hides it.
    buffers: batch-norm statistics after training; None if they are not sent.
    metrics: figures that the aggregator needs (the training loss, for FedBoosting).
    sealed: the encrypted tensors and buffers, with an aggregator that encrypts them.
    """

    tensors: Params
    kind: UpdateKind
    num_examples: int | None = None
    buffers: Params | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    sealed: State | None = None


@dataclass(frozen=True)
class Truth:
    """The private data of a client's round. Only the scoring of attacks may read it.

    examples: every example that was used, once. steps: for each local step the indices of its batch in `examples`.
    learning_rates: the rate of each step.
    """

    examples: Batch
    steps: Sequence[Tensor]
    learning_rates: Sequence[float]


@dataclass(frozen=True)
class ClientTrace:
    """One client's part of a round, including ground truth."""

    update: Update
    truth: Truth


@dataclass(frozen=True)
class Protection:
    """What a client does to protect itself, for those who only pass it on; its hooks are in `protocols.Defense`."""


@dataclass(frozen=True)
class RoundTrace:
    """A whole round, including ground truth. It never reaches an attack, which gets `ThreatModel.observe` of it.

    aggregate: the change that the server applied, as an update over all examples of the round.
    """

    model: nn.Module
    task: Task
    broadcast: Broadcast
    clients: Mapping[str, ClientTrace]
    aggregate: Update
    local: LocalTraining
    defense: Protection
    mode: Mode
    inputs: Inputs
    num_classes: int
    public_data: Batch | None = None


@dataclass(frozen=True)
class Observation:
    """What the attacker has. A fact that the threat model does not disclose is None.

    labels: the targets of the client's examples, sorted; each distinct one once if the number of examples is unknown.
    batch_size: the number of examples of the update, disclosed or sent by the client.
    mode: whether clients run batch normalisation as in training or as in evaluation; known with `local_training`.
    defense: `Defense()` if the attacker knows that there is none.
    earlier: the rounds of the same client that the attacker watched before, with other examples, in order.
    """

    model: nn.Module
    task: Task
    broadcast: Broadcast
    update: Update
    inputs: Inputs
    num_classes: int
    labels: Tensor | None = None
    batch_size: int | None = None
    local_training: LocalTraining | None = None
    mode: Mode | None = None
    defense: Protection | None = None
    public_data: Batch | None = None
    earlier: tuple[Earlier, ...] = ()

    @property
    def num_steps(self) -> int | None:
        """How many local steps are behind the update; None where it is not known."""
        if self.update.kind == "gradient":
            return 1
        if self.local_training is None or self.batch_size is None:
            return None
        return self.local_training.num_steps(self.batch_size)


@dataclass(frozen=True)
class Earlier:
    """An earlier round of a client, and the attacker's own guess of the examples behind it."""

    seen: Observation
    guess: Batch


@dataclass(frozen=True)
class Certificate:
    """What an attack proves about its guess from the update alone, without the truth.

    proof: a few words for what was checked. figure: the result. needed: the least figure of a proof.
    """

    proof: str
    figure: float
    needed: float

    @property
    def holds(self) -> bool:
        """Whether the guess is proven to be the client's examples."""
        return self.figure >= self.needed


@dataclass(frozen=True)
class Reconstruction:
    """The result of an attack: the guess, its loss under the attack's own objective, and notes.

    first_loss: the loss after the first iteration; None where there are no iterations.
    history: pairs of iteration and loss on the way to the guess.
    certificate: what the attack can prove about the guess; None if nothing.
    others: guesses that an ensemble did not choose, by the name of the attack that made them.
    labels: as read from the update by an attack whose guess has given labels; None if it read none beside the guess.
    """

    guess: Batch
    loss: float
    notes: Mapping[str, Any] = field(default_factory=dict)
    first_loss: float | None = None
    history: tuple[tuple[int, float], ...] = ()
    certificate: Certificate | None = None
    others: Mapping[str, Batch] = field(default_factory=dict)
    labels: Tensor | None = None
