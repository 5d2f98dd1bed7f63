"""Clients whose secrets an attacker has got hold of, to the last digit: it knows all that they did but how they drew.

Settings are those under which the draws show best, and what would have been sent without them is known as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tests.security import scan
from tests.security.scan import DRAWS, Law, Numbers, Sight
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.core.protocols import Defense
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import buffers_of, cloned, parameters_of, weighted_mean
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Examples, Params, Update
from leaktight.defenses.ada_lrp import AdaLrp
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.fed_cdp import FedCdp
from leaktight.defenses.fedkl import FedKl
from leaktight.defenses.graddefense import GradDefense
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.minmax import MinMaxSampling
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.outpost import Outpost
from leaktight.defenses.precode import Precode
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client, ClientRound
from leaktight.fl.fedboosting import TRAINING_LOSS, FedBoosting, NoisyFusion, PlainCombined
from leaktight.fl.local import Trainer
from leaktight.fl.messages import Train
from leaktight.fl.plan import Setup
from leaktight.models.bottleneck import VariationalBottleneck

SEED = 7
ROUND = 3
NUMBER = 40
ONE_STEP = LocalTraining(epochs=1, batch_size=NUMBER, learning_rate=1.0)
MANY_STEPS = LocalTraining(epochs=DRAWS, batch_size=NUMBER, learning_rate=0.01)
CLIENTS = ("ann", "bob", "cyd")

NOISY: Mapping[str, tuple[Defense, Defense]] = {
    "noise gaussian": (AdditiveNoise(), AdditiveNoise(noise_std=0.0)),
    "noise gaussian, update": (AdditiveNoise(at="update"), AdditiveNoise(noise_std=0.0)),
    "noise laplace": (AdditiveNoise(distribution="laplace"), AdditiveNoise(noise_std=0.0)),
    "dp_sgd": (DpSgd(), DpSgd(noise_multiplier=0.0)),
    "fed_cdp": (FedCdp(), FedCdp(noise_multiplier=0.0)),
    "client_dp": (ClientDp(), ClientDp(noise_multiplier=0.0)),
    "outpost": (
        Outpost(prune_share=0.0, noise_share=1.0, fisher="element"),
        Outpost(prune_share=0.0, noise_scale=0.0),
    ),
    "graddefense": (GradDefense(noise_std=0.1, num_slices=1, num_perturbed=1), GradDefense(noise_std=0.0)),
}
"""Defenses that add noise: with it and without it."""

LAWS: Mapping[str, Law] = {"float32": scan.randn32, "float64": scan.randn64, "laplace": scan.laplace32}
"""How a generator would have drawn noise."""


def network() -> nn.Module:
    with global_seed(Rng(0)):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(16, 3))


def make_client(defense: Defense, local: LocalTraining = ONE_STEP) -> Client:
    """A client whose examples are known by their first pixel."""
    images = torch.randint(256, (NUMBER, 3, 4, 4), generator=Rng(1).public(), dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(NUMBER, dtype=torch.uint8)
    examples = Examples(images, torch.arange(NUMBER) % 3)
    model = defense.prepare(network(), rng=Rng(2))
    rng = replayed(SEED).child("client", "ann")
    return Client("ann", examples, examples, Setup(Trainer(model, local, defense=defense), FedAvg(scheme="I")), rng)


def request(client: Client, *, moved: float = 0.0, learning_rate: float | None = None, scale: float = 1.0) -> Train:
    """Training in the same round, from the client's network or one near it."""
    model = client.trainer.model
    params = {name: tensor + moved for name, tensor in cloned(parameters_of(model)).items()}
    broadcast = Broadcast(params, cloned(buffers_of(model)), ROUND)
    return Train(broadcast, learning_rate or client.trainer.local.learning_rate, loss_scale=scale)


def played(defense: Defense, local: LocalTraining = ONE_STEP, **asked: Any) -> ClientRound:
    """One round of a client that has answered nothing yet."""
    client = make_client(defense, local)
    return client.train_round(request(client, **asked), None)


def sent(done: ClientRound) -> Params:
    return done.trained.update.tensors


def noise_of(defense: Defense, silent: Defense, **asked: Any) -> dict[str, Tensor]:
    """What the defense added: what was sent, without what is sent under the same settings without noise."""
    noisy, clean = sent(played(defense, **asked)), sent(played(silent, **asked))
    return {name: tensor.double() - clean[name].double() for name, tensor in noisy.items()}


def flat(tensors: Params) -> Numbers:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).numpy()


def _of_noise(kind: str) -> dict[str, Sight]:
    defense, silent = NOISY[kind]
    noise = noise_of(defense, silent)
    return {
        sight: each
        for name, tensor in noise.items()
        if tensor.numel() >= DRAWS
        for sight, each in _noise_sights(f"{kind}, {name}", tensor).items()
    }


def _noise_sights(name: str, noise: Tensor) -> dict[str, Sight]:
    return {f"{name}, {law}": Sight(LAWS[law], noise.reshape(-1).numpy()) for law in LAWS}


def _minmax() -> dict[str, Sight]:
    """Which entries were kept; the attacker reads the threshold off what was sent: g + C / g in place of g."""
    entries = flat(sent(played(Defense()))).astype(np.float64)
    got = flat(sent(played(MinMaxSampling(keep_share=0.5)))).astype(np.float64)
    kept = got != 0
    threshold = float(np.median(((got - entries) * entries)[kept]))
    squares = entries[:DRAWS, None] ** 2

    def law(words: Numbers) -> Numbers:
        uniform = 1 - scan.rand64(words)[:DRAWS]
        kept_of_these: Numbers = ((1 / uniform - 1) * squares > threshold).astype(np.float32)
        return kept_of_these

    return {"minmax, kept": Sight(law, kept[:DRAWS].astype(np.float32))}


def _precode() -> dict[str, Sight]:
    drawn: list[Tensor] = []
    draw = VariationalBottleneck.draw

    def overheard(self: VariationalBottleneck, like: Tensor) -> Tensor:
        noise = draw(self, like)
        drawn.append(noise.detach().clone())
        return noise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VariationalBottleneck, "draw", overheard)
        played(Precode(latent_size=4))
    return {"precode, bottleneck": Sight(scan.randn32, drawn[0].reshape(-1).numpy())}


def _fedkl() -> dict[str, Sight]:
    client = make_client(FedKl(key_length=DRAWS))
    model, _ = client.trainer.defense.start(network_of(client), client.facts, rng=client.rng.child("defense", "start"))
    state = client.train_round(request(client), None).state
    key = next(tensor for name, tensor in state.buffers.items() if name.endswith(".key"))
    lock = next(tensor for name, tensor in parameters_of(model).items() if name.endswith("lock.scale.weight"))
    return {
        "fedkl, key": Sight(scan.rand32, key.numpy()),
        "fedkl, lock": Sight(scan.rand32, lock.reshape(-1).numpy()),
    }


def network_of(client: Client) -> nn.Module:
    return client.trainer.defense.prepare(network(), rng=Rng(2))


def _rates(defense: Defense) -> dict[str, Sight]:
    rates = played(defense, MANY_STEPS).truth().learning_rates
    return {f"{type(defense).__name__}, rates": Sight(scan.rand64, np.array(rates))}


def _batches() -> dict[str, Sight]:
    order = played(Defense()).truth().examples.inputs[:, 0, 0, 0] * 255
    return {"batches, order": Sight(scan.randperm(NUMBER), order.round().numpy())}


def _fusion() -> dict[str, Sight]:
    """Mixtures that clients are shown, without what is in them."""
    model, rng = network(), replayed(SEED).child("server", "round", ROUND, "aggregate")
    params = cloned(parameters_of(model))
    changes = {name: {key: 0.01 * (n + 1) * tensor for key, tensor in params.items()} for n, name in enumerate(CLIENTS)}
    updates = {name: Update(each, "delta", 10, metrics={TRAINING_LOSS: 1.0}) for name, each in changes.items()}
    fusion = NoisyFusion(noise_multiplier=1.0)
    boosting = FedBoosting(fusion=fusion)
    asked = next(boosting.weigh(updates, PlainCombined(changes), broadcast=Broadcast(params, {}, ROUND), rng=rng))
    shares = fusion.shares(list(CLIENTS), rng=rng.child("fusion", "shares"))
    sights: dict[str, Sight] = {}
    for name, candidate in asked[CLIENTS[0]].payload["candidates"].items():
        mixed = weighted_mean({client: changes[client] for client in shares[name]}, shares[name])
        noise = candidate["changes"]["0.weight"].double() - mixed["0.weight"].double()
        sights |= _noise_sights(f"fusion, {name}", noise)
    return sights


SCENES: Mapping[str, Callable[[], dict[str, Sight]]] = {
    **{kind: lambda kind=kind: _of_noise(kind) for kind in NOISY},  # type: ignore[misc]
    "minmax": _minmax,
    "precode": _precode,
    "fedkl": _fedkl,
    "lrp": lambda: _rates(Lrp()),
    "ada_lrp": lambda: _rates(AdaLrp()),
    "batches": _batches,
    "fusion": _fusion,
}
"""Everything that is drawn for somebody's protection."""


@dataclass
class Overheard:
    """The places in the tree of random streams at which secrets were drawn while somebody was listening."""

    places: set[Rng] = field(default_factory=set)
    listening: bool = True

    def numbers(self) -> set[int]:
        """All that somebody who knows the seed and the paths can compute, and what else makes a poor seed."""
        found = {0, SEED, ROUND, int(time.time())}
        for place in self.places:
            for length in range(len(place.path) + 1):
                named = Rng(place.seed, place.path[:length])
                found |= {named.entropy(), named.entropy(8), named.entropy(8) >> 1, named.entropy(4)}
        return found


@contextmanager
def overhearing() -> Iterator[Overheard]:
    """Note where secrets are drawn."""
    heard = Overheard()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("secret", "secret_bytes"):
            patch.setattr(Rng, name, _noting(getattr(Rng, name), heard))
        yield heard


def _noting(draw: Callable[..., Any], heard: Overheard) -> Callable[..., Any]:
    def noted(self: Rng, *args: Any, **settings: Any) -> Any:
        if heard.listening:
            heard.places.add(self)
        return draw(self, *args, **settings)

    return noted
