"""Fishing through ordinary rounds: what the fished update is made of, and what a search makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from tests.attacks.tampered import Scene, scene
from tests.seeds import replayed
from torch import nn

from leaktight.attacks.labels.rules import Wainakh
from leaktight.attacks.malicious.fishing import Fishing, Strategy, caught
from leaktight.config.catalogue import MODELS
from leaktight.core.errors import ModelError, NotDisclosedError, UsageError
from leaktight.core.protocols import ActiveAttack
from leaktight.core.tensors import cloned
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, Params, Update
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.fl.aggregators import FedSgd
from leaktight.fl.local import Trainer, loss_and_gradient
from leaktight.metrics import psnr
from leaktight.models.initialise import build_model
from leaktight.models.surgery import mode_of

TARGET = 3


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits(size=16).load(Path())


def network(data: Dataset, kind: str) -> nn.Module:
    return build_model(MODELS[kind](), data.inputs, data.num_classes, rng=replayed(4))


def batch_with(data: Dataset, wanted: int, others: int) -> list[int]:
    """So many examples of the target class first, then so many of others."""
    own = (data.train.targets == TARGET).nonzero()[:, 0].tolist()
    rest = (data.train.targets != TARGET).nonzero()[:, 0].tolist()
    return own[:wanted] + rest[:others]


def pond(data: Dataset, kind: str, mode: Literal["train", "eval"], wanted: int = 1, others: int = 31) -> Scene:
    examples = batch_with(data, wanted, others)
    return scene(data, network(data, kind), batch=len(examples), examples=examples, mode=mode)


def alone(seen: Observation, batch: Batch, mode: Literal["train", "eval"]) -> Params:
    """The gradient that these examples would have sent by themselves."""
    trainer = Trainer(seen.model, LocalTraining(), mode=mode)
    with mode_of(seen.model, mode):
        return loss_and_gradient(trainer, seen.broadcast.params, cloned(seen.broadcast.buffers), batch)[1]


def cosine(left: Params, right: Params) -> float:
    one, other = (torch.cat([each[name].double().flatten() for name in left]) for each in (left, right))
    return float(one @ other / (one.norm() * other.norm()))


def of_class(truth: Batch, label: int = TARGET) -> Batch:
    mask = truth.targets == label
    return Batch(truth.inputs[mask], truth.targets[mask])


@pytest.mark.parametrize("kind", ["lenet_zhu", "resnet20"])
def test_the_update_becomes_that_of_one_image(digits: Dataset, kind: str) -> None:
    attack = Fishing(target=TARGET, class_weight=0.5 if kind == "lenet_zhu" else 1e-4)  # features of 16 and of 10^4
    truth, seen = pond(digits, kind, "eval").play(attack)
    one = attack.catch(seen, rng=replayed(0))
    own = alone(seen[-1], of_class(truth), "eval")
    assert len(seen) == 2, "an honest query for the labels, and one with another last layer"
    assert one.batch_size == 1
    assert one.labels is not None
    assert one.labels.tolist() == [TARGET]
    assert "classifier.weight" not in one.update.tensors
    for name, tensor in one.update.tensors.items():
        assert torch.allclose(tensor, own[name], rtol=1e-3, atol=1e-4 * float(own[name].abs().max() + 1e-9)), name
    honest = {name: tensor for name, tensor in seen[0].update.tensors.items() if name in one.update.tensors}
    assert cosine(honest, alone(seen[0], of_class(truth), "eval")) < 0.9 < cosine(one.update.tensors, own)


def test_batch_statistics_spoil_it(digits: Dataset) -> None:
    attack = Fishing(target=TARGET)
    truth, seen = pond(digits, "resnet20", "train").play(attack)
    one = attack.catch(seen, rng=replayed(0))
    assert cosine(one.update.tensors, alone(seen[-1], of_class(truth), "train")) < 0.5


def test_the_image_is_found_among_others_and_not_without_tampering() -> None:
    small = Digits(size=8).load(Path())
    model = build_model(MODELS["lenet_zhu"](), small.inputs, small.num_classes, init="wide", rng=replayed(4))

    def closeness(strategy: Strategy) -> float:
        attack = Fishing(target=TARGET, strategy=strategy, iterations=80, learning_rate=0.1, backend="eager")
        played = scene(small, model, batch=16, examples=batch_with(small, 1, 15))
        truth, seen = played.play(attack)
        found = attack.reconstruct(seen, rng=replayed(0))
        assert found.guess.targets.tolist() == [TARGET]
        return float(psnr(found.guess.inputs, of_class(truth).inputs))

    assert closeness("class") > closeness("none") + 4


def test_labels_are_read_from_an_honest_update_and_choose_the_rarest_class(digits: Dataset) -> None:
    attack = Fishing()
    truth, seen = pond(digits, "lenet_zhu", "eval", wanted=1, others=63).play(attack)
    target, strategy = attack._plan(seen[0], replayed(0))
    counts = torch.bincount(truth.targets, minlength=10)
    assert counts[target] > 0
    assert counts[target] <= counts[counts > 0].min() + 1, "inferred, so not always exact"
    assert strategy in ("class", "feature")


def test_one_feature_separates_images_of_one_class(digits: Dataset) -> None:
    """The setting of the paper: every image has the wanted label."""
    attack = Fishing(target=TARGET, strategy="feature", max_queries=10, feature_weight=1e6)
    truth, seen = pond(digits, "lenet_zhu", "eval", wanted=12, others=0).play(attack)
    assert 3 <= len(seen) <= 10
    counts = [caught(each, TARGET).number for each in seen[1:]]
    assert counts[0] == pytest.approx(12, rel=1e-3)
    assert counts[1] == pytest.approx(6, abs=3), "those below the mean"
    assert counts[-1] < 1.5, "each query keeps those below the mean of the last"
    one = attack.catch(seen, rng=replayed(0))
    each = [alone(seen[-1], Batch(truth.inputs[n : n + 1], truth.targets[n : n + 1]), "eval") for n in range(12)]
    sending = [own for own in each if any(bool(own[name].any()) for name in one.update.tensors)]
    assert len(sending) == 1
    assert cosine(one.update.tensors, sending[0]) > 0.999


def test_a_class_whose_gradient_is_withheld_ends_the_queries_and_not_the_attack(digits: Dataset) -> None:
    """As pruning may: the bias of the wanted class need not be among the largest."""
    attack = Fishing(target=TARGET, strategy="feature", iterations=2, backend="eager")
    made = pond(digits, "lenet_zhu", "eval", wanted=2, others=6)
    _, seen = made.play(attack)
    assert len(seen) > 2
    bias = "classifier.bias"
    pruned = seen[1].update.tensors[bias].clone()
    pruned[TARGET] = 0
    update = replace(seen[1].update, tensors={**seen[1].update.tensors, bias: pruned})
    short = [seen[0], replace(seen[1], update=update)]
    assert attack.tamper(seen[0].broadcast, short, rng=replayed(0)) is None
    found = attack.reconstruct(short, rng=replayed(0))
    assert found.notes["queries"] == 2
    assert found.guess.targets.tolist() == [TARGET]


def test_the_last_layer_moves_by_its_strength_and_nothing_else_does(digits: Dataset) -> None:
    whole, half = (pond(digits, "lenet_zhu", "eval").play(Fishing(target=TARGET, strength=s))[1] for s in (1.0, 0.5))
    honest = whole[0].broadcast.params
    for name, tensor in honest.items():
        if name.startswith("classifier"):
            full, part = (seen[1].broadcast.params[name] - tensor for seen in (whole, half))
            assert torch.allclose(part, 0.5 * full, atol=1e-3)
            assert float(full.abs().max()) > 0.3
        else:
            assert torch.equal(whole[1].broadcast.params[name], tensor)
    bias = whole[1].broadcast.params["classifier.bias"]
    assert bias[TARGET] == honest["classifier.bias"][TARGET]
    assert bias.max() == 1000.0


class FedSgdOfOne(FedSgd):
    """A server of one client, which need not say how many examples it has."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def weights(self, updates: Mapping[str, Update]) -> dict[str, float]:
        return dict.fromkeys(updates, 1.0)


def test_it_says_what_it_lacks(digits: Dataset) -> None:
    assert isinstance(Fishing(), ActiveAttack)
    blind = scene(
        digits,
        network(digits, "lenet_zhu"),
        batch=8,
        threat=ThreatModel(server="malicious", knows=frozenset({Knowledge.LOCAL_TRAINING})),
    )
    uncounted = replace(blind.federation.setup, aggregator=FedSgdOfOne())
    with pytest.raises(NotDisclosedError, match="batch_size"):
        replace(blind, federation=replace(blind.federation, setup=uncounted)).play(Fishing())
    with pytest.raises(UsageError, match="target below 10, got 11"):
        pond(digits, "lenet_zhu", "eval").play(Fishing(target=11))
    truth, (first, *_) = pond(digits, "lenet_zhu", "eval", wanted=0).play(Fishing())
    with pytest.raises(UsageError, match="an example of class 3 in the batch, got none"):
        Fishing(target=TARGET).tamper(first.broadcast, [replace(first, labels=truth.targets)], rng=replayed(0))
    headless = nn.Sequential(nn.Flatten(), nn.Linear(256, 10, bias=False))
    with pytest.raises(ModelError, match="a bias in the last layer '1'"):
        scene(digits, headless, batch=8).play(Fishing(target=1, labels=Wainakh()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "net"}, "strategy to be one of"),
        ({"max_queries": 2}, "max_queries >= 3"),
        ({"strength": 0.0}, r"strength in \(0, 1\]"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fishing(**settings)  # type: ignore[arg-type]
