"""Robust aggregation against hostile clients on MNIST: accuracy, and the time and memory of each rule.

10 clients, all in every round, 2 of them hostile. Whoever is hostile knows what all the others send in the round.
`python -m bench robust` prints the tables of docs/results/robust.md,.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from bench.scenes import peak_memory
from bench.timing import fastest
from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import load_config
from leaktight.core.errors import RoundFailedError
from leaktight.core.protocols import Aggregator
from leaktight.core.rng import Rng
from leaktight.core.types import Broadcast, Examples, Params, Update
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.federation import Federation
from leaktight.fl.local import evaluate
from leaktight.fl.messages import Outcome, Request, Trained
from leaktight.fl.protocol import carry, federate
from leaktight.fl.robust import Krum, Median, NormBound, TrimmedMean
from leaktight.fl.state import ClientState

CLIENTS, HOSTILE, SEEDS = 10, ("client-003", "client-007"), range(5)
RULES: Mapping[str, Aggregator] = {
    "mean": FedAvg(),
    "median": Median(),
    "trimmed mean": TrimmedMean(trim=0.2),
    "Krum": Krum(hostile=2),
    "multi-Krum": Krum(hostile=2, keep=8),
    "norm bound": NormBound(),
}
SPLITS = {
    "iid": "{kind='iid', clients=10, validation=0.0}",
    "Dirichlet 0.5": "{kind='dirichlet', alpha=0.5, clients=10, min_examples=32, validation=0.0}",
    "two label shards each": "{kind='shards', shards_per_client=2, clients=10, validation=0.0}",
}
TRAIN, TEST, ROUNDS = 2560, 2000, 15
LITTLE = 1.5
"""Standard deviations that "a little is enough" moves. Its formula gives 0 for 2 of 10: too few to be sure to pass."""

Sent = dict[str, Update]


@dataclass
class Attack:
    """What hostile clients send in place of their updates. honest: the updates of the others."""

    change: Callable[[Update, Sent], Update] = lambda own, honest: own
    flips_labels: bool = False
    replays: bool = False
    kept: Sent = field(default_factory=dict)

    def __call__(self, name: str, own: Update, honest: Sent) -> Update:
        if self.replays:
            return self.kept.setdefault(name, own)
        return self.change(own, honest)


def _mapped(update: Update, change: Callable[[str, Tensor], Tensor]) -> Update:
    return replace(update, tensors={name: change(name, tensor) for name, tensor in update.tensors.items()})


def _little(own: Update, honest: Sent) -> Update:
    """The honest mean, moved against its own direction by a few standard deviations of the honest values."""

    def moved(name: str, tensor: Tensor) -> Tensor:
        values = torch.stack([update.tensors[name] for update in honest.values()])
        return values.mean(0) - LITTLE * values.std(0) * values.mean(0).sign()

    return _mapped(own, moved)


ATTACKS: Mapping[str, Callable[[], Attack]] = {
    "none": Attack,
    "sign flip, times -50": lambda: Attack(lambda own, honest: _mapped(own, lambda _, tensor: -50 * tensor)),
    "all values 1e6": lambda: Attack(lambda own, honest: _mapped(own, lambda _, tensor: torch.full_like(tensor, 1e6))),
    "first update again": lambda: Attack(replays=True),
    "labels flipped": lambda: Attack(flips_labels=True),
    "a little is enough": lambda: Attack(_little),
}


def scene(split: str, seed: int) -> Federation:
    config = load_config(
        None,
        [
            f"seed={seed}",
            f"secret_seed={seed:064x}",
            "data={kind='mnist'}",
            f"partition={SPLITS[split]}",
            "model={kind='mlp', hidden=[64]}",
            "local={epochs=1, batch_size=32, learning_rate=0.3}",
            f"federation={{rounds={ROUNDS}}}",
        ],
    )
    dataset, _ = load_data(config)
    some = torch.randperm(len(dataset.train), generator=Rng(seed).child("some").public())[:TRAIN]
    small = replace(dataset, train=dataset.train.take(some), test=dataset.test.part(0, TEST))
    return build_federation(config, small, config.partition.split(small, rng=Rng(seed).child("partition")))


def accuracy(federation: Federation, attack: Attack) -> float:
    """Of the final model; that of a guess if the model was broken so far that a round failed."""
    clients = {name: federation.client(name) for name in federation.shares}
    if attack.flips_labels:
        for name in HOSTILE:
            train = clients[name].train
            flipped = Examples(train.inputs, federation.dataset.num_classes - 1 - train.targets)
            clients[name] = replace(clients[name], train=flipped)
    states: dict[str, ClientState] = {}

    def exchange(requests: Mapping[str, Request]) -> dict[str, Outcome]:
        replies: dict[str, Outcome] = {}
        for name, request in requests.items():
            replies[name], states[name] = clients[name].handle(request, states.get(name))
        sent = {name: reply.update for name, reply in replies.items() if isinstance(reply, Trained)}
        honest = {name: update for name, update in sent.items() if name not in HOSTILE}
        return replies | {name: Trained(attack(name, sent[name], honest)) for name in HOSTILE if name in sent}

    conversation = federate(
        federation.server, federation.first_state().server, evaluate=None, after_round=lambda outcome: None
    )
    try:
        final = carry(conversation, exchange)
    except RoundFailedError:
        return 1 / federation.dataset.num_classes
    return evaluate(federation.trainer, final.params, final.buffers, federation.dataset.test).accuracy


def row(
    title: str, federations: list[Federation], attack: Callable[[], Attack], rules: Mapping[str, Aggregator] = RULES
) -> None:
    """A line of a table: the mean accuracy of each rule, and half the width of its interval of 95 %."""
    cells = []
    for rule in rules.values():
        scores = [accuracy(_with(each, rule), attack()) for each in federations]
        cells.append(_interval(scores))
    print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


def _with(federation: Federation, rule: Aggregator) -> Federation:
    return replace(federation, setup=replace(federation.setup, aggregator=rule))


def _interval(scores: list[float]) -> str:
    from scipy.stats import t

    half = t.ppf(0.975, len(scores) - 1) * statistics.stdev(scores) / len(scores) ** 0.5
    return f"{100 * statistics.mean(scores):.1f} ± {100 * half:.1f}"


def head(first: str, names: Mapping[str, object] = RULES) -> None:
    print(f"\n| {first} | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))


def attacked() -> None:
    """The accuracy of every rule under every attack."""
    for split in ("iid", "Dirichlet 0.5"):
        federations = [scene(split, seed) for seed in SEEDS]
        head(f"{split}: 2 of 10 send")
        for name, attack in ATTACKS.items():
            row(name, federations, attack)


DEFENSES: Mapping[str, str] = {
    "compression, 80 % pruned": "compression",
    "minmax, 5 % kept": "minmax",
    "lrp": "lrp",
    "adadefense": "{kind='adadefense', learning_rate=0.01}",
    "client_dp, multiplier 0.01": "{kind='client_dp', noise_multiplier=0.01}",
}


def defended() -> None:
    """The accuracy of every rule, without an attack, where honest values differ: by the data, or by a defense."""
    rules = {**RULES, "mean": FedAvg(scheme="I")}  # lrp hides the number of examples
    head("nobody hostile")
    row("two label shards each, no defense", [scene("two label shards each", seed) for seed in SEEDS], Attack, rules)
    for name, table in DEFENSES.items():
        defense = load_config(None, [f"defense={table}"]).defense
        row(f"iid, {name}", [scene("iid", seed).with_defense(defense) for seed in SEEDS], Attack, rules)


def updates(size: int) -> tuple[Broadcast, Sent]:
    generator = Rng(0).public()
    params: Params = {f"layer{place}": torch.zeros(size // 4) for place in range(4)}
    sent = {
        f"client-{place:03d}": Update(
            {name: torch.randn(tensor.shape, generator=generator) for name, tensor in params.items()}, "delta", 100
        )
        for place in range(CLIENTS)
    }
    return Broadcast(params, {}, 0), sent


def combine(rule: Aggregator, broadcast: Broadcast, sent: Sent) -> None:
    state = rule.start(broadcast.params)
    for _ in rule.aggregate(sent, state, broadcast=broadcast, rng=Rng(0)):
        raise AssertionError("it asked a question")


def once(name: str | None, size: int) -> None:
    broadcast, sent = updates(size)
    if name is not None:
        combine(RULES[name], broadcast, sent)


def cost(sizes: tuple[int, ...] = (1_000_000,)) -> None:
    """Seconds of a round's aggregation, and its peak of memory beside the updates themselves."""
    for size in sizes:
        broadcast, sent = updates(size)
        seconds = fastest({name: partial(combine, rule, broadcast, sent) for name, rule in RULES.items()}, repeats=3)
        held = peak_memory(once, None, size)[1]
        memory = {name: peak_memory(once, name, size)[1] - held for name in RULES}
        head(f"10 updates of {size:,} parameters")
        print("| seconds | " + " | ".join(f"{value:.3f}" for value in seconds.values()) + " |")
        print("| times the mean | " + " | ".join(f"{value / seconds['mean']:.1f}" for value in seconds.values()) + " |")
        print("| MB beside the updates | " + " | ".join(f"{max(value, 0):.0f}" for value in memory.values()) + " |")


PARTS: Mapping[str, Callable[[], None]] = {"attacked": attacked, "defended": defended, "cost": cost}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
