"""The values that move through a federation. All of them are immutable; tensors in them are never written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from leaktight.core.errors import DataError
from leaktight.core.inputs import Images, Inputs
from leaktight.core.tasks import Task
from leaktight.core.training import LocalTraining

Params = Mapping[str, Tensor]
"""Tensors by parameter name, in the order of the model."""

State = Mapping[str, Any]
"""What a defense or an aggregator remembers: nested mappings of tensors, numbers, strings, bytes and None."""

UpdateKind = Literal["gradient", "delta"]

Mode = Literal["train", "eval"]
"""How batch normalisation and dropout run."""


@dataclass(frozen=True)
class Batch:
    """Examples as a model takes them: inputs (N, ...), images (N, C, H, W) in [0, 1]; targets as the task has them."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


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

    model: the network itself, where a server hands out another than the one agreed on; None, as honest ones send it,
    is the client's own. It travels within one process only.
    """

    params: Params
    buffers: Params
    round: int
    model: nn.Module | None = None


@dataclass(frozen=True)
class Update:
    """What leaves a client, and all that leaves it.

    tensors: by parameter name; a defense may withhold names or replace values.
    kind: "gradient" of one batch, or "delta", the local parameters minus those received.
    num_examples: how many examples stand behind it; None where the aggregator does not need it or a defense hides it.
    buffers: batch-norm statistics after training; None where they are not sent.
    metrics: figures that the aggregator needs (the training loss, for FedBoosting).
    sealed: what takes the place of tensors and buffers where the aggregator has them encrypted.
    """

    tensors: Params
    kind: UpdateKind
    num_examples: int | None = None
    buffers: Params | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    sealed: State | None = None


@dataclass(frozen=True)
class Truth:
    """What really happened at a client in one round. Only the judge may look at it.

    examples: every example that was used, once. steps: for each local step the places in `examples` of its batch.
    learning_rates: the rate of each step.
    """

    examples: Batch
    steps: Sequence[Tensor]
    learning_rates: Sequence[float]


@dataclass(frozen=True)
class ClientTrace:
    """One client's part of a round, seen from nowhere: what it sent, and the truth behind it."""

    update: Update
    truth: Truth


@dataclass(frozen=True)
class Protection:
    """What a client does to protect itself, for those who only pass it on; its hooks are in `protocols.Defense`."""


@dataclass(frozen=True)
class RoundTrace:
    """Everything that happened in a round, truth included. It never reaches an attack; `ThreatModel.observe` does that.

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
    """What the adversary has. A fact that the threat model does not disclose is None.

    labels: the targets of the client's examples, sorted, so that their order tells nothing; where the number of
    examples is not known, every target that occurs, once.
    batch_size: the number of examples behind the update, told or sent along.
    mode: whether clients run batch normalisation as in training or as in evaluation; known with `local_training`.
    defense: the identity `Defense()` when the attacker knows that there is none.
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

    @property
    def num_steps(self) -> int | None:
        """How many local steps are behind the update; None where it is not known."""
        if self.update.kind == "gradient":
            return 1
        if self.local_training is None or self.batch_size is None:
            return None
        return self.local_training.num_steps(self.batch_size)


@dataclass(frozen=True)
class Reconstruction:
    """An attack's answer: the guess, the attack's own loss for it, and what the attack has to say about its work.

    first_loss: the loss after the first iteration; None where there are no iterations.
    history: pairs of iteration and loss on the way to the guess.
    """

    guess: Batch
    loss: float
    notes: Mapping[str, Any] = field(default_factory=dict)
    first_loss: float | None = None
    history: tuple[tuple[int, float], ...] = ()
