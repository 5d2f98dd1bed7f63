"""The guard on honest federations, beside every defense, and on a malicious server's models: `python -m bench guard`.

Parts: honest, defenses, tricks, weaker, rounds, speed. What is counted goes to bench/guard.json, which has the figures of
docs/results/malicious-server.md. Limits were chosen on seeds below 100; what is reported has seeds from 100 on.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.tricks import TRICKS, Victim, mirrored_head, quantile_biases, split_imprint, trap_weights
from leaktight.config.catalogue import AGGREGATORS, DATASETS, DEFENSES, MODELS
from leaktight.core.errors import RefusedError
from leaktight.core.protocols import Defense, Guard, Report, Sight
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Mode, Params, State, Update
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Dirichlet, Iid
from leaktight.engines.inprocess import run
from leaktight.fl.federation import assemble
from leaktight.fl.local import Trainer, local_update
from leaktight.fl.plan import FederationPlan
from leaktight.guard import BroadcastGuard, Judgement
from leaktight.models.initialise import build_model

KEPT = Path(__file__).with_suffix(".json")
FIRST_SEED = 100
KEY = bytes(range(32))
NETWORKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "MLP": ("mlp", {}),
    "LeNet": ("lenet_zhu", {}),
    "LeNet, ReLU": ("lenet_zhu", {"activation": "relu"}),
    "LeNet-5, ReLU": ("grnn_lenet", {"activation": "relu"}),
    "CNN": ("shallow_cnn", {"channels": (16, 32), "hidden": 128}),
    "ResNet-20": ("resnet20", {}),
}


@cache
def dataset(name: str) -> Dataset:
    sizes: dict[str, dict[str, Any]] = {"digits": {"size": 16}, "photos": {"size": 16}, "faces": {"size": 16}}
    return DATASETS[name](**sizes.get(name, {})).load(Path(os.environ.get("LEAKTIGHT_DATA", "data")))


def network(data: Dataset, name: str, seed: int, init: str = "default") -> nn.Module:
    kind, settings = NETWORKS[name]
    return build_model(MODELS[kind](**settings), data.inputs, data.num_classes, init=init, rng=Rng(seed))


@dataclass
class Watch(Guard):
    """Notes what the guard finds, and lets every model pass. own: a network of the client's in place of the agreed one."""

    own: nn.Module | None = None
    guard: BroadcastGuard = field(default_factory=BroadcastGuard)
    judged: list[Judgement] = field(default_factory=list)

    def admit(
        self, broadcast: Broadcast, model: nn.Module, sight: Sight | None, state: State, *, report: Report
    ) -> State:
        if sight is not None:
            self.judged.append(self.guard.judge(broadcast, self.own or model, sight, state))
        return replace(self.guard, action="warn", **_OPEN).admit(broadcast, model, None, state, report=report)

    def after(self, update: Update, broadcast: Broadcast, state: State) -> State:
        return self.guard.after(update, broadcast, state)


_OPEN = {name: 1e30 for name in ("alike", "mirrored", "row", "bias", "jump")}


@dataclass(frozen=True, kw_only=True)
class Honest:
    """An honest federation, whose models are judged."""

    data: str = "digits"
    net: str = "MLP"
    init: str = "default"
    iid: bool = True
    aggregator: str = "fedavg"
    rounds: int = 6
    batch: int = 16
    epochs: int = 1
    rate: float = 0.05
    mode: Mode = "train"
    defense: Defense = Defense()

    def judged(self, seed: int) -> list[Judgement]:
        """What the guard finds in every model that a client gets."""
        data = dataset(self.data)
        plain = type(self.defense) is Defense
        watch = Watch(network(data, self.net, seed + 50_000, self.init) if plain else None)
        clients = 8
        small = replace(data, train=data.train.take(torch.randperm(len(data.train), generator=Rng(seed).public())[:480]))
        parts = Iid(clients=clients, validation=0.0) if self.iid else Dirichlet(clients=clients, alpha=0.5, validation=0.0)
        federation = assemble(
            replace(small, groups=None),
            parts.split(replace(small, groups=None), rng=Rng(seed)),
            network(data, self.net, seed, self.init),
            local=LocalTraining(batch_size=self.batch, epochs=self.epochs, learning_rate=self.rate),
            aggregator=AGGREGATORS[self.aggregator](),
            plan=FederationPlan(rounds=self.rounds, per_round=clients // 2, min_clients=1),
            defense=self.defense,
            mode=self.mode,
            guard=watch,
            rng=Rng(seed, key=KEY),
        )
        run(federation, workers=1, score=False)
        return watch.judged
