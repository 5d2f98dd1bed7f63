from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.seeds import replayed
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from leaktight.core.errors import ModelError
from leaktight.core.inputs import Images
from leaktight.core.protocols import ClientFacts, Defense, Report
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, digest, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Examples, State, Update
from leaktight.data.embedded import Digits
from leaktight.data.partition import Iid
from leaktight.defenses.fedkl import FedKl, LockContent, score_keys
from leaktight.defenses.stack import Stack
from leaktight.engines.inprocess import run
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client, ClientRound
from leaktight.fl.federation import Federation, assemble
from leaktight.fl.local import Trainer, loss_and_gradient
from leaktight.fl.messages import Train, encode
from leaktight.fl.plan import FederationPlan, Setup
from leaktight.fl.protocol import RoundOutcome
from leaktight.fl.state import ClientState, load_checkpoint, save_checkpoint
from leaktight.models.initialise import build_model
from leaktight.models.keylock import KeyLock
from leaktight.models.resnet import ResNet20
from leaktight.models.small import LeNetZhu, Mlp
from leaktight.models.source import ModelSource
from leaktight.models.surgery import batch_statistics

SHAPE = Images(1, 12, 12)
FACTS = ClientFacts("a", 24, 3)
LENET = LeNetZhu(activation="relu")
BOTH = pytest.mark.parametrize("source", [LENET, ResNet20()], ids=["lenet_zhu", "resnet20"])


def prepared(source: ModelSource, defense: Defense) -> nn.Module:
    model = build_model(source, SHAPE, 3, rng=replayed(0))
    return defense.prepare(model, rng=replayed(1))


def examples() -> Examples:
    generator = replayed(2).public()
    images = torch.randint(256, (24, *SHAPE.shape), generator=generator, dtype=torch.uint8)
    return Examples(images, torch.randint(3, (24,), generator=generator))


def make_client(source: ModelSource = LENET, defense: Defense = FedKl(), name: str = "a") -> Client:
    local = LocalTraining(batch_size=8, learning_rate=0.05, momentum=0.5)
    trainer = Trainer(prepared(source, defense), local, defense=defense)
    return Client(name, examples(), examples(), Setup(trainer, FedAvg()), replayed(3).child(name), test=examples())


def train(client: Client, state: ClientState | None = None, round_index: int = 0) -> ClientRound:
    model = client.trainer.model
    broadcast = Broadcast(parameters_of(model), buffers_of(model), round_index)
    return client.train_round(Train(broadcast, learning_rate=0.05), state)


def pairs(tensors: Iterable[Tensor]) -> set[bytes]:
    """Every two neighbouring float32 numbers as bytes; round numbers, which hold a zero byte, prove nothing."""
    found = set()
    for tensor in tensors:
        flat = tensor.flatten()
        raw = flat.numpy().tobytes()
        found |= {raw[place : place + 8] for place in range(0, len(raw) - 7, 4)}
    return {pair for pair in found if 0 not in pair}


def windows(data: bytes) -> set[bytes]:
    return {data[place : place + 8] for place in range(len(data) - 7)}


@pytest.mark.parametrize(
    ("source", "defense"),
    [(LENET, FedKl()), (LENET, FedKl(blocks="all")), (ResNet20(), FedKl())],
    ids=["lenet_zhu", "lenet_zhu-all", "resnet20"],
)
def test_no_byte_of_key_lock_or_statistics_leaves_the_client(source: ModelSource, defense: Defense) -> None:
    client = make_client(source, defense)
    first = train(client)
    second = train(client, first.state, 1)
    sent = windows(encode({"reply": second.trained}))
    assert pairs(second.trained.update.tensors.values()) <= sent, "the search finds what is there"
    for state in (first.state, second.state):
        secret = {**state.params, **state.buffers}
        assert {name.rsplit(".", 1)[-1] for name in secret} >= {"key", "weight", "bias", "running_mean", "running_var"}
        assert not pairs(tensor for tensor in secret.values() if tensor.is_floating_point()) & sent
    moved = [after - first.state.params[name] for name, after in second.state.params.items()]
    assert not pairs(moved) & sent
    assert second.trained.update.buffers is not None
    assert not any("lock" in name for name in (*second.trained.update.tensors, *second.trained.update.buffers))


@BOTH
def test_the_network_that_all_share_keeps_its_names(source: ModelSource) -> None:
    plain = build_model(source, SHAPE, 3, rng=replayed(0))
    shared = prepared(source, FedKl())
    assert set(parameters_of(plain)) - set(parameters_of(shared)) == (
        {"bn1.weight", "bn1.bias"} if isinstance(source, ResNet20) else set()
    )
    assert set(parameters_of(shared)) <= set(parameters_of(plain))
    own, _ = FedKl().start(copy.deepcopy(shared), FACTS, rng=replayed(4))
    assert {name.split(".lock.")[-1] for name in set(own.state_dict()) - set(shared.state_dict())} == {
        "key",
        "scale.weight",
        "scale.bias",
        "shift.weight",
        "shift.bias",
    }


def test_the_lock_is_what_the_thesis_says() -> None:
    """Convolution, batch norm without scale and shift, gamma x + beta, both linear in one key; written out by hand."""
    model, _ = FedKl(key_length=7).start(prepared(LENET, FedKl()), FACTS, rng=replayed(4))
    inputs = examples().batch().inputs
    tensors = {**parameters_of(model), **buffers_of(model)}
    key, at = tensors["features.0.norm.lock.key"], "features.0.norm.lock"
    assert key.shape == (7,)
    assert bool(((key >= 0) & (key < 1)).all())
    gamma = tensors[f"{at}.scale.weight"] @ key + tensors[f"{at}.scale.bias"]
    beta = tensors[f"{at}.shift.weight"] @ key + tensors[f"{at}.shift.bias"]
    hidden = F.conv2d(inputs, tensors["features.0.weight"], tensors["features.0.bias"], stride=2, padding=2)
    mean, std = hidden.mean((0, 2, 3), keepdim=True), (hidden.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
    hidden = (gamma[:, None, None] * (hidden - mean) / std + beta[:, None, None]).relu()
    hidden = F.conv2d(hidden, tensors["features.2.weight"], tensors["features.2.bias"], stride=2, padding=2).relu()
    hidden = F.conv2d(hidden, tensors["features.4.weight"], tensors["features.4.bias"], padding=2).relu()
    expected = F.linear(hidden.flatten(1), tensors["classifier.weight"], tensors["classifier.bias"])
    torch.testing.assert_close(model.train()(inputs), expected)


def test_the_published_variant_rectifies_and_sends_the_statistics() -> None:
    model, state = FedKl(variant="code").start(prepared(LENET, FedKl()), FACTS, rng=replayed(4))
    (lock,) = [module for module in model.modules() if isinstance(module, KeyLock)]
    plain = lock.scale(lock.key), lock.shift(lock.key)
    for published, linear in zip(lock.coefficients(), plain, strict=True):
        assert bool((linear < 0).any())
        assert torch.equal(published, linear.clamp(min=0))
    assert state["withheld"] == []
    update = train(make_client(defense=FedKl(variant="code"))).trained.update
    assert set(update.buffers or {}) == {
        f"features.0.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_the_lock_learns_and_the_key_does_not() -> None:
    """The gradient of W k + b is that of b times the key, so every change of W is the change of b times the key."""
    client = make_client()
    before, _ = FedKl().start(
        copy.deepcopy(client.trainer.model), client.facts, rng=client.rng.child("defense", "start")
    )
    after = train(client).state
    key = after.buffers["features.0.norm.lock.key"]
    assert torch.equal(key, buffers_of(before)["features.0.norm.lock.key"])
    for part in ("scale", "shift"):
        weight, bias = (
            after.params[name] - parameters_of(before)[name]
            for name in (f"features.0.norm.lock.{part}.weight", f"features.0.norm.lock.{part}.bias")
        )
        assert float(bias.abs().max()) > 1e-5
        torch.testing.assert_close(weight, torch.outer(bias, key), rtol=1e-3, atol=1e-6)


def test_every_client_has_its_own_key_and_lock_and_keeps_them() -> None:
    first, again, other = train(make_client()), train(make_client()), train(make_client(name="b"))
    ours, same, theirs = ({**done.state.params, **done.state.buffers} for done in (first, again, other))
    assert digest(ours) == digest(same)
    for name in (set(ours) & set(theirs)) - {"features.0.norm.num_batches_tracked"}:
        assert not torch.equal(ours[name], theirs[name]), name
    later = train(make_client(), first.state, 1).state.buffers
    assert torch.equal(later["features.0.norm.lock.key"], first.state.buffers["features.0.norm.lock.key"])


@BOTH
def test_the_private_parts_survive_a_checkpoint(source: ModelSource, tmp_path: Path) -> None:
    client = make_client(source)
    first = train(client)
    save_checkpoint(tmp_path / "client", first.state.stored())
    stored = ClientState.restored(load_checkpoint(tmp_path / "client"))
    kept, restored = train(client, first.state, 1), train(client, stored, 1)
    lost = train(client, None, 1)
    parts = [digest({**done.state.params, **done.state.buffers}) for done in (restored, kept, lost)]
    assert parts[0] == parts[1] != parts[2]
    assert digest(restored.trained.update.tensors) == digest(kept.trained.update.tensors)


@dataclass(frozen=True)
class Quiet(Defense):
    """Sends no statistics at all."""

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        return replace(update, buffers=None), state


@pytest.mark.parametrize("order", [(FedKl(), Quiet()), (Quiet(), FedKl())], ids=["after", "before"])
def test_the_key_stays_where_another_defense_sends_no_statistics(order: tuple[Defense, ...]) -> None:
    defense = Stack(parts=order)
    assert defense.private_parts
    client = make_client(defense=defense)
    first = train(client)
    assert first.trained.update.buffers is None
    assert "features.0.norm.lock.key" in train(client, first.state, 1).state.buffers


@BOTH
def test_function_transforms_agree_with_autograd(source: ModelSource) -> None:
    defense = FedKl()
    own, _ = defense.start(prepared(source, defense), FACTS, rng=replayed(4))
    model = batch_statistics(own).double()
    params, buffers = parameters_of(model), buffers_of(model)
    inputs, targets = examples().batch().inputs[:4].double(), examples().targets[:4]
    trainer = Trainer(model, LocalTraining(), defense=defense)
    _, expected = loss_and_gradient(trainer, params, buffers, Batch(inputs, targets))
    _, traced = loss_and_gradient(trainer, params, buffers, Batch(inputs, targets), create_graph=True)
    for name, gradient in expected.items():
        torch.testing.assert_close(traced[name], gradient, msg=name)
    locks = [gradient for name, gradient in expected.items() if ".lock.scale" in name]
    assert locks
    assert all(float(gradient.abs().max()) > 0 for gradient in locks)

    def loss(leaves: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, ({**leaves}, {**buffers}), (image[None],)), target[None])

    model.eval()
    each = vmap(grad(loss), in_dims=(None, 0, 0))(params, inputs, targets)
    for place in range(2):
        alone = grad(loss)(params, inputs[place], targets[place])
        for name, gradient in alone.items():
            torch.testing.assert_close(each[name][place], gradient, msg=name)


def test_what_cannot_be_locked_is_a_named_error() -> None:
    with pytest.raises(ModelError, match="a convolution to lock, got none"):
        prepared(Mlp(), FedKl())
    for source in (LENET, ResNet20()):
        with pytest.raises(ModelError, match="let the defense prepare the model"):
            FedKl().start(build_model(source, SHAPE, 3, rng=replayed(0)), FACTS, rng=replayed(1))
    with pytest.raises(ValueError, match="key_length >= 1, got 0"):
        FedKl(key_length=0)
    with pytest.raises(ValueError, match="blocks to be one of first, all, got 'some'"):
        FedKl(blocks="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="variant to be one of paper, code"):
        FedKl(variant="other")  # type: ignore[arg-type]


def digits(defense: Defense, rounds: int, evaluate_every: int = 1) -> Federation:
    dataset = Digits().load(Path())
    return assemble(
        dataset,
        Iid(clients=3, validation=0.1).split(dataset, rng=replayed(0)),
        build_model(LENET, dataset.inputs, dataset.num_classes, rng=replayed(1)),
        local=LocalTraining(batch_size=16, learning_rate=0.002, momentum=0.9),
        aggregator=FedAvg(),
        plan=FederationPlan(rounds=rounds, evaluate_every=evaluate_every),
        defense=defense,
        rng=replayed(2),
    )


def test_the_own_lock_opens_the_model_and_no_other_does() -> None:
    """With every block locked. It is the lock that counts: the trained lock opens with any key."""
    federation = digits(FedKl(blocks="all"), rounds=5, evaluate_every=5)
    outcomes: list[RoundOutcome] = []
    final = run(federation, workers=1, after_round=lambda outcome, state: outcomes.append(outcome))
    broadcast = Broadcast(final.server.params, final.server.buffers, final.server.round)
    scores = {
        name: score_keys(federation.client(name), broadcast, final.clients, rng=replayed(5).child(name))
        for name in federation.shares
    }
    contents: tuple[LockContent, ...] = ("own", "random", "random_key", "zero")
    own, random, random_key, zero = ([each[content].accuracy for each in scores.values()] for content in contents)
    assert min(own) > 0.8
    assert max(random) < 0.35
    assert min(random_key) > 0.6
    shares = torch.bincount(federation.dataset.test.targets) / len(federation.dataset.test)
    assert all(min(abs(shares - accuracy)) < 1e-6 for accuracy in zero), "all images are put into one class"
    assert outcomes[-1].score is not None, "the test set was scored by the clients, each with its own lock"
    assert outcomes[-1].score.num_examples == 3 * len(federation.dataset.test)
    assert outcomes[-1].score.accuracy == pytest.approx(sum(own) / 3)


def test_clients_may_score_their_validation_examples_instead() -> None:
    federation = digits(FedKl(), rounds=1)
    federation = replace(federation, plan=replace(federation.plan, evaluate="clients"))
    outcomes: list[RoundOutcome] = []
    run(federation, workers=1, after_round=lambda outcome, state: outcomes.append(outcome))
    held = sum(share.stop - share.validation for share in federation.shares.values())
    assert outcomes[0].score is not None
    assert outcomes[0].score.num_examples == held
