"""A federation put together: data and partition become clients, a model becomes what they train."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leaktight.core.inputs import require_inputs
from leaktight.core.protocols import Aggregator, Defense, Guard
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Examples, Mode, State
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Partition
from leaktight.fl.client import Client
from leaktight.fl.consent import Agreement, Consent, agreed_rates
from leaktight.fl.local import Trainer
from leaktight.fl.protocol import FederationPlan, Server, ServerState, initial_state


class Share(NamedTuple):
    """Which of the federation's examples belong to a client: training from `start`, validation from `validation`."""

    start: int
    validation: int
    stop: int


@dataclass(frozen=True)
class Federation:
    """A server and its clients, before or between rounds.

    examples: those of all clients, one client after the other, so that worker processes can share them.
    consent: what clients insist on beyond the plan.
    """

    dataset: Dataset
    examples: Examples
    shares: Mapping[str, Share]
    server: Server
    trainer: Trainer
    rng: Rng
    guard: Guard | None = None
    consent: Consent = Consent()

    def client(self, name: str) -> Client:
        share = self.shares[name]
        return Client(
            name=name,
            train=self.examples.part(share.start, share.validation),
            validation=self.examples.part(share.validation, share.stop),
            trainer=self.trainer,
            aggregator=self.server.aggregator,
            rng=self.rng.child("client", name).apart(),
            test=self.dataset.test,
            guard=self.guard,
            agreement=self.agreement,
        )

    @property
    def agreement(self) -> Agreement:
        """What every client agrees to, from the plan that all have."""
        plan, server = self.server.plan, self.server
        return Agreement(
            rounds=plan.rounds,
            clients=len(server.sizes),
            learning_rates=agreed_rates(server.local, plan.rounds),
            loss_scales=(0.0, float(len(server.sizes))),
            scores_on=server.scores_on,
            consent=self.consent,
        )

    def keyed(self, key: bytes) -> Federation:
        """The same federation, with this key as the root of all that protects its clients."""
        rng = self.rng.keyed(key)
        return replace(self, server=replace(self.server, rng=rng.child("server").apart()), rng=rng)


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
    guard: Guard | None = None,
    consent: Consent = Consent(),
    rng: Rng,
) -> Federation:
    """Give every client its examples and everybody the same settings and the same network, prepared by the defense."""
    require_inputs(type(defense).__name__, defense.takes, dataset.inputs)
    model = defense.prepare(copy.deepcopy(model), rng=rng.child("defense", "prepare"))
    shares: dict[str, Share] = {}
    order: list[Tensor] = []
    start = 0
    for name, holding in sorted(partition.clients.items()):
        validation = start + len(holding.train)
        shares[name] = Share(start, validation, validation + len(holding.validation))
        order += [holding.train, holding.validation]
        start = shares[name].stop
    sizes = {name: share.validation - share.start for name, share in shares.items()}
    return Federation(
        dataset=dataset,
        examples=dataset.train.take(torch.cat(order)),
        shares=shares,
        server=Server(sizes, aggregator, local, plan, rng.child("server").apart(), defense),
        trainer=Trainer(model, local, dataset.task, defense, mode),
        rng=rng,
        guard=guard,
        consent=consent,
    )


def defended(federation: Federation, defense: Defense) -> Federation:
    """An undefended federation with a defense: everything else, down to the random streams, is the same."""
    require_inputs(type(defense).__name__, defense.takes, federation.dataset.inputs)
    model = defense.prepare(copy.deepcopy(federation.trainer.model), rng=federation.rng.child("defense", "prepare"))
    return replace(
        federation,
        server=replace(federation.server, defense=defense),
        trainer=replace(federation.trainer, model=model, defense=defense),
    )


def first_state(federation: Federation) -> FederationState:
    """The state before the first round: the model's own weights, nothing remembered."""
    model = federation.trainer.model
    return FederationState(initial_state(federation.server, cloned(parameters_of(model)), cloned(buffers_of(model))))
