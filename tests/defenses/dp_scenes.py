"""Small scenes for the tests of differential privacy and of the stand-in."""

from __future__ import annotations

from typing import Any

import torch
from tests.seeds import replayed
from torch import nn

from leaktight.core.protocols import ClientFacts, Defense
from leaktight.core.rng import global_seed
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Examples, Mode
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client, ClientRound
from leaktight.fl.local import LocalResult, Trainer, local_update
from leaktight.fl.messages import Train
from leaktight.fl.plan import Setup
from leaktight.fl.state import ClientState


def small_network(*, normalised: bool = False) -> nn.Module:
    """Convolution, sigmoid, linear, in float64; with batch normalisation when asked."""
    with global_seed(replayed(0)):
        norm = [nn.BatchNorm2d(4)] if normalised else []
        layers = [nn.Conv2d(1, 4, 3), *norm, nn.Sigmoid(), nn.Flatten(), nn.Linear(16, 3)]
        return nn.Sequential(*layers).double()


def batch_of(size: int, seed: int = 1) -> Batch:
    generator = replayed(seed).public()
    inputs = torch.rand(size, 1, 4, 4, generator=generator, dtype=torch.float64)
    return Batch(inputs, torch.randint(3, (size,), generator=generator))


def train_steps(
    defense: Defense,
    model: nn.Module,
    batches: list[Batch],
    *,
    mode: Mode = "train",
    num_examples: int = 100,
    seed: int = 0,
    **options: Any,
) -> LocalResult:
    """Local training from a fresh state; `gradient` of the result is the last step's, after the defense."""
    _, state = defense.start(model, ClientFacts("a", num_examples, 3), rng=replayed(0))
    return local_update(
        Trainer(model, LocalTraining(learning_rate=0.1), defense=defense, mode=mode),
        parameters_of(model),
        buffers_of(model),
        batches,
        learning_rates=[0.1] * len(batches),
        state=state,
        rng=replayed(seed),
        **options,
    )


def client_of(
    defense: Defense, model: nn.Module, *, name: str = "a", local: LocalTraining | None = None, mode: Mode = "train"
) -> Client:
    """A client with 40 examples, which come as float32."""
    generator = replayed(2).public()
    examples = Examples(
        torch.randint(256, (40, 1, 4, 4), generator=generator, dtype=torch.uint8),
        torch.randint(3, (40,), generator=generator),
    )
    local = local or LocalTraining(epochs=2, batch_size=12)
    return Client(
        name=name,
        train=examples,
        validation=examples.part(0, 5),
        setup=Setup(Trainer(model, local, defense=defense, mode=mode), FedAvg()),
        rng=replayed(3).child("client", name),
    )


def play(client: Client, model: nn.Module, rounds: int, state: ClientState | None = None) -> list[ClientRound]:
    """Several rounds of one client on a server's model that stays as it is."""
    done: list[ClientRound] = []
    start = 0 if state is None else state.conduct.round + 1
    for index in range(start, start + rounds):
        broadcast = Broadcast(parameters_of(model), buffers_of(model), index)
        done.append(client.train_round(Train(broadcast, learning_rate=0.1), state))
        state = done[-1].state
    return done
