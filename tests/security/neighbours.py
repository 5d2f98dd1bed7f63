"""Neighbouring data sets for `distinguish`, and the methods that are to hide which of two it is.

Every method runs as it does in a federation, with new secret keys each time; the attacker gets what the server gets (a
client, for noisy fusion), knows everything else, and forms the log-likelihood ratio. Data are the worst there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tests.fl.talks import SMALL, talk_of
from tests.security.distinguish import (
    DELTA,
    Case,
    Claim,
    Numbers,
    Run,
)
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.protocols import Defense
from leaktight.core.tensors import parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Examples, Params, Update
from leaktight.crypto.ckks import Ckks
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.fed_cdp import FedCdp
from leaktight.defenses.wrap import wrap
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.fedboosting import FedBoosting, NoisyFusion
from leaktight.fl.local import Trainer, plan_batches
from leaktight.fl.messages import Train
from leaktight.fl.plan import Setup
from leaktight.fl.state import ClientState

LAYERS = 2
CANARIES = 128
"""Examples that light one pixel each. Their gradients are orthogonal, so that each of them is a trial of its own."""
OWN = (0.75, 0.75)
"""With two clients every weight of a fusion is then known, and every client moves the mixtures as far as any."""


class Heads(nn.Module):
    """Linear layers without bias, all zero, whose outputs add up: a black image has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(CANARIES, 2, bias=False) for _ in range(LAYERS))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([layer(inputs.flatten(1)) for layer in self.layers]).sum(0)


def pushed(tensors: Params) -> Numbers:
    """How far an update goes along the gradient of class 0, for every pixel: with two classes, of one direction."""
    result: Numbers = torch.stack([tensor[0] - tensor[1] for tensor in tensors.values()]).double().sum(0).numpy()
    return result


def coins_of(number: int, count: int) -> Numbers:
    coins: Numbers = replayed(number).child("coins").public_numpy().random(count) < 0.5
    return coins


def canaries(coins: Numbers) -> Examples:
    """One lit pixel each; where the coin says no, black: there, and contributing zero."""
    return Examples(
        torch.diag(torch.from_numpy(coins).to(torch.uint8) * 255)[:, None, None],
        torch.zeros(CANARIES, dtype=torch.long),
    )


def make_client(defense: Defense, examples: Examples, local: LocalTraining, number: int) -> Client:
    return Client("a", examples, examples, Setup(Trainer(Heads(), local, defense=defense), FedAvg()), replayed(number))


def trained(client: Client, rounds: int, look: Callable[[Params, int], Numbers]) -> tuple[Numbers, Claim]:
    """What a server sees of a client over several rounds, added up, and what the client says of its privacy."""
    state: ClientState | None = None
    params = parameters_of(client.trainer.model)
    seen: list[Numbers] = []
    for index in range(rounds):
        done = client.train_round(Train(Broadcast(params, {}, index), client.trainer.local.learning_rate), state)
        state = done.state
        seen.append(look(done.trained.update.tensors, index))
    spent = client.trainer.defense.spent(done.state.defense)
    assert spent is not None
    assert spent.delta == DELTA
    claim = Claim(done.report["epsilon"], spent.epsilon, done.report.get("epsilon_if_poisson"))
    return np.sum(seen, axis=0), claim


def sgd(defense: DpSgd, local: LocalTraining, rounds: int = 1) -> Callable[[int], Run]:
    """DP of examples: many canaries at once, of which each is there or not, whatever the others do."""

    def play(number: int) -> Run:
        coins = coins_of(number, CANARIES)
        client = make_client(defense, canaries(coins), local, number)
        seen, claim = trained(client, rounds, lambda tensors, index: pushed(tensors) / defense.clip_norm_in(index))
        return Run(seen, coins, claim)

    return play


def last_step(defense: DpSgd, local: LocalTraining) -> Callable[[int], Run]:
    """The attacker was told the order of the batches, and weight decay leaves nothing but the last step to be seen."""
    whole = sgd(defense, local)

    def play(number: int) -> Run:
        run = whole(number)
        chosen, steps = plan_batches(CANARIES, local, rng=replayed(number).child("round", 0, "batches"))
        last = chosen[steps[-1]].numpy()
        return Run(run.seen[last], run.coins[last], run.claim)

    return play


def own_loop(defense: DpSgd, steps: int) -> Callable[[int], Run]:
    """A loop of the user's own that uses one batch in every step, and says nothing about epochs."""

    def play(number: int) -> Run:
        coins, rate = coins_of(number, CANARIES), 0.1
        defended = wrap(defense, Heads(), num_examples=CANARIES, num_classes=2, rng=replayed(number))
        optimizer = torch.optim.SGD(defended.model.parameters(), lr=rate)
        batch = canaries(coins).batch()
        defended.start_round(rate, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            defended.loss(defended.model(batch.inputs), batch.targets).backward()
            defended.protect(batch.inputs, batch.targets)
            optimizer.step()
        update, metrics = defended.finish_round(), defended.metrics
        assert defended.spent is not None
        claim = Claim(metrics["epsilon"], defended.spent.epsilon, metrics["epsilon_if_poisson"])
        return Run(pushed(update.tensors), coins, claim)

    return play


def whole_client(defense: ClientDp, rounds: int = 1) -> Callable[[int], Run]:
    """DP of clients: an update against none (black images), or against its opposite (the other label)."""
    local = LocalTraining(batch_size=2, learning_rate=1.0)

    def play(number: int) -> Run:
        coins = coins_of(number, 1)
        removed = not coins[0] and defense.adjacency == "remove"
        images = torch.full((2, 1, 1, CANARIES), 0 if removed else 255, dtype=torch.uint8)
        examples = Examples(images, torch.full((2,), 0 if coins[0] else 1))
        client = make_client(defense, examples, local, number)
        seen, claim = trained(client, rounds, lambda tensors, index: pushed(tensors).sum()[None])
        return Run(seen, coins, claim)

    return play


def fused(aggregator: FedBoosting | Encrypted, rounds: int = 1, clients: int = 2) -> Callable[[int], Run]:
    """Client c1 looks at the mixtures that it is to validate, and asks which of two opposite updates c0 has sent.

    It is told the weights of the mixtures, which are the server's secret; epsilon holds even then.
    """
    inside = aggregator.of if isinstance(aggregator, Encrypted) else aggregator
    assert isinstance(inside, FedBoosting)
    fusion = inside.fusion
    assert isinstance(fusion, NoisyFusion)
    start = {"w": torch.zeros(8)}
    along, across = torch.tensor([1.0] * 4 + [0.0] * 4), torch.tensor([0.0] * 4 + [1.0] * 4)
    talk = talk_of(aggregator, clients)
    state = talk.agreed(start)
    path = ["of"] if isinstance(aggregator, Encrypted) else []

    def look(broadcast: Broadcast) -> float:
        (sent,) = [asked.payload for name, asked in talk.asked if name == "c1" and "candidates" in asked.payload]
        candidates: Mapping[str, Any] = sent["candidates"]
        if isinstance(aggregator, Encrypted):
            candidates = aggregator._opened(sent, talk.states["c1"], talk.members["c1"])
        rng = replayed(talk.seed).child("server", broadcast.round, *path, "fusion", "shares")
        shares = fusion.shares(sorted(talk.members), rng=rng)
        mixtures = (shares[name]["c0"] * float(candidates[name]["changes"]["w"] @ along) for name in shares)
        return sum(mixtures) / fusion.noise_std(shares) ** 2

    def play(number: int) -> Run:
        coins, seen, talk.seed = coins_of(number, 1), 0.0, number
        tensors = dict.fromkeys(talk.members, across) | {"c0": along if coins[0] else -along}
        updates = {name: Update({"w": tensor}, "delta", 1) for name, tensor in tensors.items()}
        for index in range(rounds):
            talk.asked.clear()
            broadcast = Broadcast(start, {}, index)
            talk.round(updates, state, broadcast)
            seen += look(broadcast)
        exact = gaussian_epsilon(math.sqrt(rounds) / fusion.noise_multiplier, DELTA)
        return Run(np.array([seen]), coins, Claim(fusion.epsilon(rounds, DELTA), exact))

    return play


def boosting(multiplier: float, **settings: Any) -> FedBoosting:
    return FedBoosting(fusion=NoisyFusion(noise_multiplier=multiplier, **settings))


def paillier(multiplier: float) -> Encrypted:
    return Encrypted(of=boosting(multiplier, own=OWN), cipher=SMALL)


def ckks(multiplier: float) -> Encrypted:
    return Encrypted(of=boosting(multiplier, own=OWN), cipher=Ckks())


def dp(multiplier: float) -> DpSgd:
    return DpSgd(clip_norm=0.1, noise_multiplier=multiplier)


def cdp(multiplier: float, **settings: Any) -> FedCdp:
    return FedCdp(clip_norm=0.1, noise_multiplier=multiplier, **settings)


def full(epochs: int) -> LocalTraining:
    return LocalTraining(epochs=epochs, batch_size=CANARIES, learning_rate=0.1)


EIGHT = LocalTraining(batch_size=CANARIES // 8, learning_rate=0.1)
LAST = LocalTraining(batch_size=CANARIES // 8, learning_rate=0.1, weight_decay=10.0)
REPLACED = ClientDp(noise_multiplier=2.0, adjacency="replace")

EXAMPLES: Mapping[str, Case] = {
    "dp_sgd": Case("`dp_sgd`", "noise 1, 1 step", 1.0, 200, lambda: sgd(dp(1.0), full(1))),
    "dp_sgd, rounds": Case(
        "`dp_sgd`", "noise 4, 4 rounds of 4 epochs, 1 batch each", 1.0, 200, lambda: sgd(dp(4.0), full(4), rounds=4)
    ),
    "dp_sgd, order unknown": Case(
        "`dp_sgd`", "noise 2, 1 epoch of 8 batches, order unknown", 0.5 / 8**0.5, 1500, lambda: sgd(dp(2.0), EIGHT)
    ),
    "dp_sgd, order known": Case(
        "`dp_sgd`", "noise 2, 1 epoch of 8 batches, order known", 0.5, 1600, lambda: last_step(dp(2.0), LAST)
    ),
    "wrap": Case("`dp_sgd`, `wrap`", "noise 1, one batch 50 times", 50**0.5, 40, lambda: own_loop(dp(1.0), 50)),
    "fed_cdp": Case("`fed_cdp`", "noise 1, 2 layers, 1 step", 2**0.5, 200, lambda: sgd(cdp(1.0), full(1))),
    "fed_cdp, rounds": Case(
        "`fed_cdp`",
        "noise 4, 2 layers, 4 rounds, norm halved on the way",
        0.5**0.5,
        400,
        lambda: sgd(cdp(4.0, final_clip_norm=0.05, decay_rounds=3), full(1), rounds=4),
    ),
}
CLIENTS: Mapping[str, Case] = {
    "client_dp": Case("`client_dp`", "noise 1, removed, 1 round", 1.0, 6000, lambda: whole_client(ClientDp())),
    "client_dp, rounds": Case(
        "`client_dp`", "noise 2, replaced, 4 rounds", 2.0, 2500, lambda: whole_client(REPLACED, rounds=4)
    ),
    "fusion": Case("noisy fusion", "noise 1, 1 round", 1.0, 6000, lambda: fused(boosting(1.0, own=OWN))),
    "fusion, rounds": Case(
        "noisy fusion", "noise 2, 4 rounds", 1.0, 6000, lambda: fused(boosting(2.0, own=OWN), rounds=4)
    ),
    "fusion, weights": Case(
        "noisy fusion", "noise 1, 3 clients, default weights", 1.0, 6000, lambda: fused(boosting(1.0), clients=3), 0.5
    ),
    "paillier": Case("noisy fusion, Paillier", "noise 1, 1 round", 1.0, 5000, lambda: fused(paillier(1.0))),
    "paillier, rounds": Case(
        "noisy fusion, Paillier", "noise 1, 4 rounds", 2.0, 1500, lambda: fused(paillier(1.0), rounds=4)
    ),
    "ckks": Case("noisy fusion, CKKS", "noise 0.5, 1 round", 2.0, 1000, lambda: fused(ckks(0.5)), 0.7),
    "ckks, weak": Case("noisy fusion, CKKS", "noise 0.25, 1 round", 4.0, 600, lambda: fused(ckks(0.25)), 0.7),
}
SHARES = Case(
    "`client_dp`", "noise 1 in 4 shares, one update", 2.0, 2500, lambda: whole_client(ClientDp(noise_shares=4))
)
"""Reported is the epsilon of the sum of four updates; the server reads one of them, for which `spent` stands."""
CASES: Mapping[str, Case] = {**EXAMPLES, **CLIENTS}
