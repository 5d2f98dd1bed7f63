"""A federation, built from data, a partition and a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leaktight.core.devices import CPU, moved, working_on
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
from leaktight.fl.limits import Limits
from leaktight.fl.local import Trainer
from leaktight.fl.plan import FederationPlan, Server, Setup
from leaktight.fl.protocol import ServerState, initial_state
from leaktight.fl.state import ClientState
from leaktight.models.surgery import mode_of, working_bytes
from leaktight.runtime.memory import processes_on


class Share(NamedTuple):
    """The examples of a client: training examples [start, validation), validation examples [validation, stop)."""

    start: int
    validation: int
    stop: int


@dataclass(frozen=True)
class Federation:
    """A server and its clients, before or between rounds.

    dataset: its training examples are those of all clients, ordered by client, so that worker processes can share them.
    shares: where each client's lie. setup: shared by server and clients. consent: the clients' own limits.
    drawn, network: see `Server`.
    """

    dataset: Dataset
    shares: Mapping[str, Share]
    setup: Setup
    plan: FederationPlan
    rng: Rng
    guard: Guard | None = None
    consent: Consent = Consent()
    drawn: tuple[str, ...] | None = None
    network: nn.Module | None = None

    def __post_init__(self) -> None:
        _ = self.server  # building it checks that all settings fit

    @property
    def examples(self) -> Examples:
        """Those of all clients."""
        return self.dataset.train

    @property
    def trainer(self) -> Trainer:
        return self.setup.trainer

    @property
    def sizes(self) -> dict[str, int]:
        """The number of training examples by client."""
        return {name: share.validation - share.start for name, share in self.shares.items()}

    @property
    def counts(self) -> bool:
        """Whether clients count what they spend: a privacy budget, or a limit of their own."""
        return self.setup.defense.private or self.consent.limited

    @property
    def server(self) -> Server:
        return Server(self.setup, self.sizes, self.plan, self.rng.child("server").apart(), self.drawn, self.network)

    def client(self, name: str) -> Client:
        share = self.shares[name]
        return Client(
            name=name,
            train=self.examples.part(share.start, share.validation),
            validation=self.examples.part(share.validation, share.stop),
            setup=self.setup,
            rng=self.rng.child("client", name).apart(),
            test=self.dataset.test,
            guard=self.guard,
            agreement=self.agreement,
        )

    @property
    def agreement(self) -> Agreement:
        """What every client agrees to, from the plan."""
        return Agreement(
            rounds=self.plan.rounds,
            clients=len(self.shares),
            share=(self.plan.per_round or len(self.shares)) / len(self.shares),
            learning_rates=agreed_rates(self.trainer.local, self.plan.rounds),
            loss_scales=(0.0, float(len(self.shares))),
            scores_on=self.server.scores_on,
            consent=self.consent,
        )

    @property
    def limits(self) -> Limits:
        """The limits of what a client may send."""
        model = self.trainer.model
        return Limits.of_model(parameters_of(model), buffers_of(model), sealed=self.setup.aggregator.sealed)

    @property
    def most_processes(self) -> int | None:
        """How many worker processes the device has memory for; None on the CPU: one for every core."""
        device, model = self.setup.device, self.trainer.model
        if device.type == "cpu":
            return None
        batch = moved(self.examples.batch(slice(self.trainer.local.batch_size)), device)
        model, params, buffers = moved((model, parameters_of(model), buffers_of(model)), device)
        with mode_of(model, self.trainer.mode), working_on(device):
            return processes_on(device, working_bytes(model, params, buffers, batch.inputs))

    def keyed(self, key: bytes) -> Federation:
        """The same federation with this key as the root of all secret random streams."""
        return replace(self, rng=self.rng.keyed(key))

    def with_examples(self, examples: Examples) -> Federation:
        """The same federation with other examples of its clients, in the same order."""
        return replace(self, dataset=replace(self.dataset, train=examples))

    def with_defense(self, defense: Defense) -> Federation:
        """An undefended federation with a defense; all else, including the random streams, is the same."""
        require_inputs(type(defense).__name__, defense.takes, self.dataset.inputs)
        return replace(self, setup=self.setup.with_defense(defense, rng=self.rng.child("defense", "prepare")))

    def with_trainer(self, *, model: nn.Module | None = None, local: LocalTraining | None = None) -> Federation:
        """The same federation with another network or other local training."""
        trainer = replace(self.trainer, model=model or self.trainer.model, local=local or self.trainer.local)
        return replace(self, setup=replace(self.setup, trainer=trainer))

    def first_state(self) -> FederationState:
        """The state before the first round, with the model's initial weights."""
        params, buffers = cloned(parameters_of(self.trainer.model)), cloned(buffers_of(self.trainer.model))
        return FederationState(initial_state(self.server, params, buffers))


@dataclass(frozen=True)
class FederationState:
    """The server's state, and the state of every client that has had a request."""

    server: ServerState
    clients: Mapping[str, ClientState] = field(default_factory=dict)

    def stored(self) -> dict[str, Any]:
        """The state as nested mappings, for `save_checkpoint`."""
        return {"server": vars(self.server), "clients": {name: each.stored() for name, each in self.clients.items()}}

    @classmethod
    def restored(cls, stored: State) -> FederationState:
        """The inverse of `stored`."""
        clients = {name: ClientState.restored(each) for name, each in stored["clients"].items()}
        return cls(ServerState(**stored["server"]), clients)


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
    device: torch.device = CPU,
    rng: Rng,
) -> Federation:
    """Build a federation: give every client its examples, and prepare the model with the defense.

    The data set of the federation has the clients' examples, in their order, and not those of `dataset` once more.
    """
    shares: dict[str, Share] = {}
    order: list[Tensor] = []
    start = 0
    for name, holding in sorted(partition.clients.items()):
        validation = start + len(holding.train)
        shares[name] = Share(start, validation, validation + len(holding.validation))
        order += [holding.train, holding.validation]
        start = shares[name].stop
    places = torch.cat(order)
    groups = None if dataset.groups is None else dataset.groups[places]
    undefended = Federation(
        dataset=replace(dataset, train=dataset.train.take(places), groups=groups),
        shares=shares,
        setup=Setup(Trainer(model, local, dataset.task, mode=mode), aggregator, device),
        plan=plan,
        rng=rng,
        guard=guard,
        consent=consent,
    )
    return undefended.with_defense(defense)
