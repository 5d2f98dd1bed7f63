"""Updates of real clients behind real defenses, and how well an attack does on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tests.seeds import replayed
from torch import Tensor

from leaktight.core.protocols import Attack, Defense
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Examples, Observation, Params, UpdateKind
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.fl.aggregators import FedAvg, FedSgd
from leaktight.fl.client import Client
from leaktight.fl.local import Trainer
from leaktight.fl.messages import Train
from leaktight.fl.plan import Setup
from leaktight.fl.state import ClientState
from leaktight.metrics import match, psnr
from leaktight.models.initialise import build_model
from leaktight.models.small import LeNetZhu

LOCAL = LocalTraining(batch_size=1, learning_rate=0.1)


@dataclass(frozen=True)
class Scene:
    """What an attacker saw, and what was behind it."""

    seen: Observation
    truth: Batch
    learning_rates: tuple[float, ...]
    state: ClientState
    brings: str

    def score(self, attack: Attack, seed: int = 0) -> float:
        """PSNR of the attack's guess, the mean over examples."""
        guess = attack.reconstruct([self.seen], rng=replayed(seed)).guess.inputs
        return score(guess, self.truth)


def score(guess: Tensor, truth: Batch) -> float:
    return float(psnr(guess[match(guess, truth.inputs)].clamp(0, 1), truth.inputs).mean())


@cache
def digits() -> Dataset:
    return Digits(size=8).load(Path())


def examples(count: int, seed: int) -> Examples:
    train = digits().train
    return train.take(torch.randperm(len(train), generator=replayed(seed).child("examples").public())[:count])


def play(
    defense: Defense,
    *,
    count: int = 1,
    seed: int = 3,
    noise_seed: int = 0,
    kind: UpdateKind = "gradient",
    local: LocalTraining = LOCAL,
    round_index: int = 0,
    state: ClientState | None = None,
    params: Params | None = None,
) -> Scene:
    """One round of one client, which holds `count` digits, with a LeNet of wide weights."""
    data = digits()
    plain = build_model(LeNetZhu(activation="sigmoid"), data.inputs, data.num_classes, init="wide", rng=replayed(seed))
    model = defense.prepare(plain, rng=replayed(seed).child("prepare"))
    held = examples(count, seed)
    aggregator = FedSgd() if kind == "gradient" else FedAvg()
    client = Client("a", held, held, Setup(Trainer(model, local, defense=defense), aggregator), replayed(noise_seed))
    broadcast = Broadcast(params or cloned(parameters_of(model)), cloned(buffers_of(model)), round_index)
    done = client.train_round(Train(broadcast, local.learning_rate, kind), state)
    truth = done.truth()
    seen = Observation(
        model=model,
        task=data.task,
        broadcast=broadcast,
        update=done.trained.update,
        inputs=data.inputs,
        num_classes=data.num_classes,
        labels=truth.examples.targets.sort().values,
        batch_size=count,
        local_training=local,
        mode="train",
        defense=defense,
    )
    return Scene(seen, truth.examples, tuple(truth.learning_rates), done.state, client.brings)
