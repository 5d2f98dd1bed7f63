"""The guard on honest federations, beside every defense, and on a malicious server's models: `python -m bench guard`.

Parts: honest, published, defenses, tricks, weaker, rounds, speed. What is counted goes to bench/guard.json, which has
the figures of docs/results/malicious-server.md. Limits were chosen on seeds below 100; what is reported has seeds from
100 on.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.tricks import TRICKS, Victim, mirrored_head, quantile_biases, site_of, split_imprint, trap_weights
from leaktight.config.catalogue import AGGREGATORS, DATASETS, DEFENSES, MODELS
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
from leaktight.models.surgery import final_linear

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
    """Notes what the guard finds, and lets every model pass. own: the client's network, in place of the agreed one."""

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


_OPEN = dict.fromkeys(("alike", "mirrored", "row", "bias", "jump"), 1e30)


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
    settings: dict[str, Any] = field(default_factory=dict)
    per_round: int = 4

    def judged(self, seed: int) -> list[Judgement]:
        """What the guard finds in every model that a client gets."""
        data = dataset(self.data)
        plain = type(self.defense) is Defense
        watch = Watch(network(data, self.net, seed + 50_000, self.init) if plain else None)
        clients = 8
        small = replace(
            data, train=data.train.take(torch.randperm(len(data.train), generator=Rng(seed).public())[:480])
        )
        parts: Iid | Dirichlet = Iid(clients=clients, validation=0.0)
        if not self.iid:
            alpha = 0.5 if data.num_classes > 2 else 5.0
            parts = Dirichlet(clients=clients, alpha=alpha, min_examples=self.batch, validation=0.0)
        federation = assemble(
            small,
            parts.split(small, rng=Rng(seed)),
            network(data, self.net, seed, self.init),
            local=LocalTraining(batch_size=self.batch, epochs=self.epochs, learning_rate=self.rate),
            aggregator=AGGREGATORS[self.aggregator](**self.settings),
            plan=FederationPlan(rounds=self.rounds, per_round=self.per_round, min_clients=1),
            defense=self.defense,
            mode=self.mode,
            guard=watch,
            rng=Rng(seed, key=KEY),
        )
        run(federation, workers=1, score=False)
        return watch.judged


def honest_scenes() -> Iterator[Honest]:
    """The honest federations: networks, data, starts, stages, divisions, batch sizes and servers."""
    for data in ("digits", "photos", "faces", "mnist"):
        batch = 8 if data == "faces" else 16
        yield Honest(data=data, iid=data != "photos")
        yield Honest(data=data, net="LeNet", iid=False, aggregator="server_momentum", batch=batch)
        yield Honest(data=data, net="LeNet, ReLU", batch=8)
        yield Honest(data=data, net="CNN", iid=False, batch=batch)
    yield Honest(init="kaiming", iid=False)
    yield Honest(data="mnist", init="kaiming")
    yield Honest(data="photos", net="LeNet", init="wide", rate=0.1)
    yield Honest(net="LeNet", init="wide", iid=False)
    yield Honest(data="mnist", net="LeNet-5, ReLU", iid=False)
    yield Honest(data="cifar10", net="LeNet-5, ReLU", rounds=4)
    yield Honest(data="cifar10", net="CNN", rounds=2, iid=False)
    yield Honest(aggregator="fedsgd", batch=60, rate=0.1, rounds=8)
    yield Honest(data="photos", net="LeNet, ReLU", aggregator="server_adam")
    yield Honest(data="mnist", aggregator="server_adam", iid=False)
    yield Honest(batch=1, rounds=3)
    yield Honest(net="CNN", batch=2, rounds=3, rate=0.02)
    yield Honest(rounds=30, rate=0.1, iid=False, per_round=2)
    yield Honest(data="mnist", net="CNN", rounds=20, per_round=2, rate=0.1)
    yield Honest(net="LeNet, ReLU", rounds=30, per_round=2, rate=0.1, iid=False)
    yield Honest(net="ResNet-20", rounds=2)
    yield Honest(data="faces", net="ResNet-20", rounds=2, iid=False, batch=8)
    yield Honest(data="photos", net="ResNet-20", rounds=3, mode="eval", rate=0.01, per_round=2)


def _counted(judged: Sequence[Judgement]) -> dict[str, Any]:
    codes = Counter(finding.code for each in judged for finding in each.findings)
    names = dict.fromkeys(name for each in judged for name in each.signs)
    most = {name: round(max(each.signs.get(name, 0.0) for each in judged), 3) for name in names}
    return {
        "models": len(judged),
        "alarms": sum(each.suspicious for each in judged),
        "codes": dict(codes),
        "most": most,
        "leak": round(max((each.leak or 0.0) for each in judged), 3),
    }


def honest(seed: int) -> Iterator[dict[str, Any]]:
    """False alarms in honest federations, and the largest value of each sign."""
    for place, scene in enumerate(honest_scenes()):
        words = f"{scene.data} {scene.net} {scene.init} {scene.aggregator} batch {scene.batch} rounds {scene.rounds}"
        yield {"scene": words, **_counted(scene.judged(seed + place))}


def defenses(seed: int) -> Iterator[dict[str, Any]]:
    """False alarms beside each defense of the catalogue."""
    for place, name in enumerate(name for name in DEFENSES if name not in ("none", "stack")):
        settings = {"scheme": "I"} if name in ("lrp", "ada_lrp") else {}
        for net in ("ResNet-20",) if name == "fedkl" else ("MLP", "LeNet"):
            slow = net == "ResNet-20" or (name, net) == ("soteria", "LeNet")
            scene = Honest(
                net=net,
                iid=False,
                defense=DEFENSES[name](),
                rounds=3 if slow else 10,
                per_round=2 if slow else 4,
                settings=settings,
            )
            yield {"scene": f"{name} {net}", **_counted(scene.judged(seed + place))}


class Attacked:
    """A first round: an honest model, untrained or after some steps, and a client's 32 examples."""

    def __init__(self, data: str, net: str, seed: int, steps: int, batch: int = 32) -> None:
        self.data, self.seed = dataset(data), seed
        self.model, self.own = (network(self.data, net, each) for each in (seed, seed + 50_000))
        generator = Rng(seed).public()
        order = torch.randperm(len(self.data.train), generator=generator)
        self.batch = self.data.train.batch(order[:batch])
        self.params, self.buffers = cloned(parameters_of(self.model)), cloned(buffers_of(self.model))
        if steps:
            others = order[batch:].repeat(1 + steps * 32 // len(order))[: steps * 32].split(32)
            result = local_update(
                Trainer(self.model, LocalTraining()),
                self.params,
                self.buffers,
                map(self.data.train.batch, others),
                learning_rates=[0.05] * len(others),
            )
            self.params, self.buffers = result.params, result.buffers
        public = self.data.test.batch(torch.randperm(len(self.data.test), generator=generator)[:256]).inputs
        self.victim = Victim(self.model, self.params, self.buffers, public, batch, generator)

    def judge(self, params: Params, *, private: bool = False) -> Judgement:
        sight = Sight(inputs=self.data.inputs, rng=Rng(self.seed, key=KEY), examples=None if private else self.batch)
        return BroadcastGuard().judge(Broadcast(params, self.buffers, 0), self.own, sight, {})


SETTINGS = (("digits", 0), ("photos", 0), ("digits", 40), ("photos", 40))


def tricks(seed: int, seeds: int = 10) -> Iterator[dict[str, Any]]:
    """How many first rounds of each trick are noticed, and what it would have got."""
    for net in ("MLP", "LeNet", "LeNet, ReLU", "CNN", "ResNet-20"):
        for data, steps in SETTINGS if net in ("MLP", "LeNet") else SETTINGS[:2]:
            scenes = [Attacked(data, net, seed + each, steps) for each in range(seeds)]
            for trick, change in {"honest": lambda victim: dict(victim.params), **TRICKS}.items():
                sent = [change(scene.victim) for scene in scenes]
                yield {"trick": trick, "net": net, "data": data, "steps": steps, **_noticed(scenes, sent)}


def _noticed(scenes: Sequence[Attacked], sent: Sequence[Params]) -> dict[str, Any]:
    judged = [scene.judge(params) for scene, params in zip(scenes, sent, strict=True)]
    made_up = [scene.judge(params, private=True) for scene, params in zip(scenes, sent, strict=True)]
    taken = [exact_share(scene, params) for scene, params in zip(scenes, sent, strict=True)]
    known = [share for share in taken if share is not None]
    return {
        "rounds": len(judged),
        "noticed": sum(each.suspicious for each in judged),
        "noticed_private": sum(each.suspicious for each in made_up),
        "codes": dict(Counter(finding.code for each in judged for finding in each.findings)),
        "leak": round(sum(each.leak or 0.0 for each in judged) / len(judged), 3),
        "exact": round(sum(known) / len(known), 3) if known else None,
    }


def exact_share(scene: Attacked, params: Params) -> float | None:
    """The share of the images in the first linear layer's gradient, to 0.01 a pixel; None without such a layer.

    Read as an attacker does: each unit's weights over its bias, and those of the sums and differences of neighbours.
    """
    first = next((name for name, tensor in params.items() if tensor.ndim > 1), "")
    size = scene.batch.inputs[0].numel()
    if params[first].ndim != 2 or params[first].shape[1] != size:
        return None
    with torch.random.fork_rng(devices=[]):
        result = local_update(
            Trainer(scene.model, LocalTraining()), params, scene.buffers, [scene.batch], learning_rates=[1.0]
        )
    weight = result.gradient[first].double()
    bias = result.gradient[first.replace("weight", "bias")].double()
    parts = [(weight, bias), (weight.diff(dim=0), bias.diff()), (weight[1:] + weight[:-1], bias[1:] + bias[:-1])]
    found = torch.cat([rows[shift != 0] / shift[shift != 0, None] for rows, shift in parts])
    away = torch.cdist(scene.batch.inputs.double().flatten(1), found, p=float("inf"))
    return float((away.amin(1) < 0.01).double().mean()) if len(found) else 0.0


def weaker(seed: int, seeds: int = 10) -> Iterator[dict[str, Any]]:
    """Weaker versions of the tricks on an MLP: how many are noticed, against what they would get."""
    versions: dict[str, Callable[[Victim], dict[str, Any]]] = {"honest": lambda victim: dict(victim.params)}
    for share in (0.5, 0.25, 0.1):
        for name, trick in (("QBI", quantile_biases), ("split imprint", split_imprint)):
            versions[f"{name} in {share:.0%} of the units"] = partial(in_part, trick, share)
    for often in (2, 4, 8):
        versions[f"QBI, active for {often} of a batch"] = partial(quantile_biases, strength=often)
    for strength in (0.5, 0.25):
        versions[f"trap weights, strength {strength:g}"] = partial(trap_weights, strength=strength)
        versions[f"mirrored last layer, strength {strength:g}"] = partial(mirrored_head, strength=strength)
    for data in ("digits", "photos"):
        scenes = [Attacked(data, "MLP", seed + each, 0) for each in range(seeds)]
        for name, change in versions.items():
            sent = [change(scene.victim) for scene in scenes]
            row = _noticed(scenes, sent)
            if name.startswith("mirrored last"):
                row["fished"] = round(sum(map(fished, scenes, sent)) / len(scenes), 3)
            yield {"trick": name, "net": "MLP", "data": data, "steps": 0, **row}


def fished(scene: Attacked, params: Params, target: int = 1) -> float:
    """The cosine of the update before the last layer to that of the one example of the wanted class in it."""
    wanted = (scene.batch.targets == target).nonzero().flatten()[:1]
    others = (scene.batch.targets != target).nonzero().flatten()
    head = final_linear(scene.model)[0]

    def change(places: Tensor) -> Tensor:
        batch = Batch(scene.batch.inputs[places], scene.batch.targets[places])
        with torch.random.fork_rng(devices=[]):
            made = local_update(
                Trainer(scene.model, LocalTraining()), params, scene.buffers, [batch], learning_rates=[1.0]
            ).gradient
        return torch.cat([each.flatten() for name, each in made.items() if not name.startswith(f"{head}.")])

    if not len(wanted):
        return 0.0
    return float(torch.cosine_similarity(change(wanted), change(torch.cat([wanted, others])), dim=0))


def in_part(trick: Callable[[Victim], dict[str, Any]], share: float, victim: Victim) -> dict[str, Any]:
    """A trick in the first units of its layer only; the others stay honest."""
    site, made = site_of(victim.model), trick(victim)
    number = round(share * len(made[f"{site.layer}.weight"]))
    mixed = dict(victim.params)
    for name in (f"{site.layer}.weight", site.shift):
        mixed[name] = torch.cat([made[name][:number], victim.params[name][number:]])
    reader = f"{site.reader}.weight"
    mixed[reader] = torch.cat([made[reader][:, :number], victim.params[reader][:, number:]], 1)
    return mixed


LIES = {"a million": 10**6, "five hundred": 500, "negative": -1, "no number": 1.5}


def round_numbers(seed: int, seeds: int = 10) -> Iterator[dict[str, Any]]:
    """Wrong numbers in a client's first and second round, and a model that moved far behind a large number."""
    for net in ("MLP", "LeNet", "ResNet-20"):
        found: Counter[str] = Counter()
        for each in range(seeds):
            found.update(_lied(Attacked("digits", net, seed + each, 0)))
        yield from ({"net": net, "number": words, "rounds": seeds, "noticed": count} for words, count in found.items())


def _lied(scene: Attacked) -> dict[str, int]:
    """Which numbers are noticed in one client's rounds."""
    guard, found = BroadcastGuard(), {}
    sight = Sight(inputs=scene.data.inputs, rng=Rng(scene.seed, key=KEY), examples=scene.batch)

    def suspicious(number: Any, params: Params, state: State) -> int:
        return int(guard.judge(Broadcast(params, scene.buffers, number), scene.own, sight, state).suspicious)

    for words, number in LIES.items():
        found[f"first round: {words}"] = suspicious(number, scene.params, {})
    first = Broadcast(scene.params, scene.buffers, 3)
    state = guard.admit(first, scene.own, None, {}, report=lambda name, value: None)
    own = {name: 0.01 * tensor for name, tensor in scene.params.items()}
    state = guard.after(Update(own, "delta"), first, state)
    for words, number in {**LIES, "the same again": 3, "an earlier one": 1}.items():
        found[f"second round: {words}"] = suspicious(number, scene.params, state)
    noise = Rng(scene.seed).public()
    far = {
        name: tensor + torch.randn(tensor.shape, generator=noise) * tensor.abs().mean()
        for name, tensor in scene.params.items()
    }
    for number in (4, 20):
        found[f"second round: moved far, number {number + 1} after 4"] = suspicious(number, far, state)
    found["second round: honest"] = suspicious(4, scene.params, state)
    return found


def speed(seed: int) -> Iterator[dict[str, Any]]:
    """Seconds of a look at a model, and of one local epoch of the client, by the number of its examples."""
    for net, data in (
        ("MLP", "digits"),
        ("LeNet", "digits"),
        ("CNN", "digits"),
        ("ResNet-20", "digits"),
        ("CNN", "cifar10"),
    ):
        for count in (64, 480):
            scene = Attacked(data, net, seed, 0, batch=count)
            steps = [
                Batch(*parts) for parts in zip(scene.batch.inputs.split(16), scene.batch.targets.split(16), strict=True)
            ]
            trainer = Trainer(scene.model, LocalTraining(batch_size=16))
            looks, epochs = [], []
            for _ in range(5):
                start = time.process_time()
                scene.judge(scene.params)
                middle = time.process_time()
                local_update(trainer, scene.params, scene.buffers, steps, learning_rates=[0.01] * len(steps))
                looks.append(middle - start)
                epochs.append(time.process_time() - middle)
            look, epoch = statistics.median(looks), statistics.median(epochs)
            yield {"net": net, "data": data, "examples": count, "look": round(look, 3), "epoch": round(epoch, 3)}


def published(seed: int) -> Iterator[dict[str, Any]]:
    """Published weights of CIFAR-10 residual networks, as a client's first model."""
    folder = Path(os.environ.get("LEAKTIGHT_DATA", "data")) / "weights_cifar10_resnet"
    data = dataset("cifar10")
    for path in sorted(folder.glob("resnet*.th")):
        kind = MODELS[path.name.partition("-")[0]](mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        model, own = (build_model(kind, data.inputs, 10, init=init, rng=Rng(seed)) for init in (path, "default"))
        judged = []
        modes: tuple[Mode, ...] = ("train", "eval", "train", "eval")
        for place, mode in enumerate(modes):
            some = torch.randperm(len(data.train), generator=Rng(seed + place).public())[:32]
            sight = Sight(inputs=data.inputs, rng=Rng(seed, key=KEY), examples=data.train.batch(some), mode=mode)
            sent = Broadcast(parameters_of(model), buffers_of(model), 0)
            judged.append(BroadcastGuard().judge(sent, own, sight, {}))
        yield {"scene": path.name, **_counted(judged)}


PARTS: Mapping[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "honest": honest,
    "published": published,
    "defenses": defenses,
    "tricks": tricks,
    "weaker": weaker,
    "rounds": round_numbers,
    "speed": speed,
}


def main(names: Sequence[str], seed: int = FIRST_SEED) -> None:
    """Run the parts that are named, or all, and keep what they count."""
    wrong = [name for name in names if name not in PARTS]
    if wrong:
        raise SystemExit(f"unknown part {wrong[0]!r}; choose from: {', '.join(PARTS)}")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in names or PARTS:
        rows = []
        for row in PARTS[name](seed):
            rows.append(row)
            print(name, json.dumps(row), flush=True)
        kept[name] = rows
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    for name in names or PARTS:
        if counted := [row for row in kept[name] if "alarms" in row]:
            print(f"{name}: {sum(row['alarms'] for row in counted)} alarms of {sum(row['models'] for row in counted)}")
