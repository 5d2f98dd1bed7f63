"""A federation put together: data and partition become clients, a model becomes what they train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from leaktight.core.protocols import Aggregator, Defense
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import State
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Partition
from leaktight.fl.client import Client
from leaktight.fl.local import Mode, Trainer
from leaktight.fl.protocol import FederationPlan, Server, ServerState, initial_state


@dataclass(frozen=True)
class Federation:
    """A server and its clients, before or between rounds."""

    dataset: Dataset
    clients: Mapping[str, Client]
    server: Server
    trainer: Trainer


@dataclass(frozen=True)
class FederationState:
    """All that changes: the server's state and each client's own (absent until the client is first asked)."""

    server: ServerState
    clients: Mapping[str, State] = field(default_factory=dict)


def assemble(
    dataset: Dataset,
    partition: Partition,
    model: nn.Module,
    *,
    local: LocalTraining,
    aggregator: Aggregator,
    plan: FederationPlan,
    defense: Defense = Defense(),
    mode: Mode = "train",
    rng: Rng,
) -> Federation:
    """Give every client its examples and everybody the same settings."""
    trainer = Trainer(model, local, dataset.task, defense, mode)
    clients = {
        name: Client(
            name=name,
            train=dataset.train.take(holding.train),
            validation=dataset.train.take(holding.validation),
            trainer=trainer,
            aggregator=aggregator,
            rng=rng.child("client", name),
        )
        for name, holding in sorted(partition.clients.items())
    }
    sizes = {name: len(client.train) for name, client in clients.items()}
    server = Server(sizes, aggregator, local, plan, rng.child("server"), defense)
    return Federation(dataset, clients, server, trainer)


def first_state(federation: Federation) -> FederationState:
    """The state before the first round: the model's own weights, nothing remembered."""
    model = federation.trainer.model
    return FederationState(initial_state(federation.server, cloned(parameters_of(model)), cloned(buffers_of(model))))
