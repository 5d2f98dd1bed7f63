"""The functions behind the tables of FedBoosting and FedKL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.seeds import replayed

from leaktight.api import audit
from leaktight.audits.experiment import TrialRunner, truth_of
from leaktight.config.scenario import build_federation
from leaktight.config.settings import load_config
from leaktight.core.inputs import Images
from leaktight.core.protocols import ClientFacts
from leaktight.core.tensors import cloned, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.fl.fedboosting import FedBoosting
from leaktight.fl.local import Trainer, loss_and_gradient
from leaktight.models.keylock import KeyLock
from leaktight.models.small import LeNetZhu
from leaktight.models.surgery import mode_of
from leaktight.reproductions.tables.fedboosting import _ValidationOnly, boundaries, dealt, with_poison
from leaktight.reproductions.tables.fedkl import _ThesisLocks, keys, knowledge, told

DIGIT = Images(1, 16, 16)
DIGITS = "data={kind='digits', size=16}"
SMALL = ("model={kind='lenet_zhu', activation='sigmoid'}", "defense.key_length=16")


def locked(defense: _ThesisLocks, client: str) -> KeyLock:
    model = defense.prepare(LeNetZhu().network(DIGIT, 10), rng=replayed(0))
    model, _ = defense.start(model, ClientFacts(client, 10, 10), rng=replayed(1).child(client))
    (lock,) = (each for each in model.modules() if isinstance(each, KeyLock))
    return lock


@pytest.mark.parametrize("from_server", [True, False])
def test_locks_of_the_server_are_the_same_and_keys_are_not(from_server: bool) -> None:
    first, second = (locked(_ThesisLocks(key_length=16, from_server=from_server), name) for name in ("a", "b"))
    assert torch.equal(first.scale.weight, second.scale.weight) is from_server
    assert not torch.equal(first.key, second.key)


def test_centred_keys_have_little_in_common() -> None:
    centred = [locked(_ThesisLocks(key_length=4096, centred=True), name).key for name in ("a", "b")]
    plain = [locked(_ThesisLocks(key_length=4096), name).key for name in ("a", "b")]
    assert abs(float(torch.cosine_similarity(centred[0], centred[1], dim=0))) < 0.1
    assert float(torch.cosine_similarity(plain[0], plain[1], dim=0)) == pytest.approx(0.75, abs=0.05)


def test_every_source_of_keys_is_scored() -> None:
    few = ("local.samples=64", "federation.rounds=1", "own.seeds=1", "own.draws=1", "own.test=50", "own.workers=1")
    values = keys([DIGITS, *SMALL, *few, "own.model=M", "own.column=D"])
    assert {"M, client 0", "M, client 2", "M, average", "M, random", "M, scale and shift 0"} <= set(values)
    average, random = (values[f"M, {row}"]["D"]["seed 0"] for row in ("average", "random"))
    assert values["M, average"]["D gap"]["seed 0"] == pytest.approx(average - random)
    network = LeNetZhu().network(DIGIT, 10)
    public, lock = sum(each.numel() for each in parameters_of(network).values()), 2 * 12 * (16 + 1)
    assert values["M, average"]["D lock, %"]["seed 0"] == pytest.approx(100 * lock / (lock + public))


def test_the_true_image_explains_what_is_seen_by_those_who_have_the_key_alone() -> None:
    settings = [DIGITS, *SMALL, "audit.trials=1"]
    planned = audit.plan(
        "audit", Path("recipe:fedkl-table-5-7"), adaptive=False, defenses_named=True, settings=settings
    )
    runner = TrialRunner(planned.experiment)
    spec = next(
        each for each in planned.experiment.trials if (each.attack.name, each.defense.name) == ("grnn", "fedkl")
    )
    scene = runner.scene(spec)
    played = runner.play(spec, scene)
    truth, client = truth_of(played.counted, [scene.victim]), scene.federation.client(scene.victim)
    ((seen,),) = played.given
    unexplained = {}
    for told_of, shown in knowledge(seen, client, truth, rng=replayed(0)).items():
        trainer = Trainer(shown.model, LocalTraining(), shown.task, mode="train")
        with mode_of(shown.model, "train"):
            own = cloned({**parameters_of(shown.model), **shown.broadcast.params})
            gradient = loss_and_gradient(trainer, own, cloned(shown.broadcast.buffers), truth)[1]
        sent = shown.update.tensors
        own_flat, sent_flat = (torch.cat([each[name].flatten() for name in sent]) for each in (gradient, sent))
        left = sent_flat - own_flat * (own_flat @ sent_flat) / (own_flat @ own_flat)
        unexplained[told_of] = float(left.norm() / sent_flat.norm())
    assert max(unexplained["key"], unexplained["both"]) < 1e-5, unexplained
    assert min(unexplained["neither"], unexplained["lock"]) > 1e-3, unexplained


@pytest.mark.slow
def test_all_that_an_attacker_may_be_told_is_tried() -> None:
    attacks = "attack=[{kind='dlg', iterations=2, restarts=1, labels={kind='given'}, backend='eager'}]"
    values = told([DIGITS, *SMALL, "audit.trials=1", "own.column=D", "own.attack=dlg", attacks])
    assert {"no key-lock module", "neither", "key", "lock", "both", "neither, defense known"} == set(values)
    assert all(set(columns) == {"D SSIM", "D PSNR"} for columns in values.values())


def test_without_training_results_the_validation_alone_decides() -> None:
    training = {"a": 0.1, "b": 5.0}
    validation = {"a": {"a": 1.0, "b": 1.0}, "b": {"a": 1.0, "b": 1.0}}
    assert _ValidationOnly(variant="code").shares(training, validation) == {"a": 0.5, "b": 0.5}
    assert FedBoosting(variant="code").shares(training, validation)["a"] > 0.9


def test_the_poisoned_client_holds_half_and_has_its_own_labels_in_another_order() -> None:
    given = ["data={kind='digits', size=8}", "model={kind='mlp', hidden=[8]}", "federation.per_round=5"]
    config = load_config(None, given)
    dataset = config.data.load(Path())
    partition = dealt(dataset, 400, replayed(0))
    assert [len(each.train) + len(each.validation) for each in partition.clients.values()] == [50, 50, 200, 50, 50]
    clean = build_federation(config, dataset, partition)
    poisoned = with_poison(clean, replayed(1))
    share = clean.shares["client-002"]
    before, after = (each.examples.targets for each in (clean, poisoned))
    changed = (before != after).nonzero().flatten()
    assert share.start <= int(changed.min()) <= int(changed.max()) < share.stop
    assert len(changed) > 100
    assert torch.equal(before.sort().values, after.sort().values)


def test_boundaries_are_compared_with_those_of_centralised_training() -> None:
    values = boundaries(["data.examples=200", "federation.rounds=1", "own.column=few", "own.seeds=1"])
    assert set(values) == {"FedAvg", "FedBoosting (paper)", "FedBoosting (code)", "centralised"}
    assert values["centralised"]["few: as centralised, %"] == {"seed 0": 100.0}
    assert 0 <= values["FedAvg"]["few: as centralised, %"]["seed 0"] <= 100
