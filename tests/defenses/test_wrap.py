from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.privacy import Spent, gaussian_epsilon
from leaktight.core.protocols import Defense, Report
from leaktight.core.rng import Rng, global_seed, secret_model
from leaktight.core.tensors import buffers_of, cloned, digest, pack, parameters_of, unpack
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Examples, Params, State, Update
from leaktight.defenses import wrap
from leaktight.defenses.adadefense import AdaDefense
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.fedkl import FedKl
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.precode import Precode
from leaktight.defenses.stack import Stack
from leaktight.defenses.wrap import Defended
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client
from leaktight.fl.local import Trainer, plan_batches
from leaktight.fl.messages import Train
from leaktight.fl.plan import Setup

PAGE = Path(__file__).parents[2] / "docs" / "defenses.md"
LOCAL = LocalTraining(epochs=2, batch_size=4, learning_rate=0.1)


def network() -> nn.Module:
    with secret_model(replayed(0)):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 3))


@pytest.fixture
def examples() -> Examples:
    generator = replayed(2).public()
    return Examples(
        torch.randint(256, (10, 3, 4, 4), generator=generator, dtype=torch.uint8),
        torch.arange(10, dtype=torch.long) % 3,
    )


def make_client(defense: Defense, examples: Examples) -> Client:
    shared = defense.prepare(network(), rng=replayed(1))
    return Client("a", examples, examples, Setup(Trainer(shared, LOCAL, defense=defense), FedAvg()), replayed(3))


def make_defended(defense: Defense, examples: Examples, **more: Any) -> Defended:
    return wrap(defense, network(), num_examples=len(examples), num_classes=3, client="a", **more)


def own_loop(defended: Defended, examples: Examples, rng: Rng, received: Broadcast) -> Update:
    """One round as a user writes it, on the same batches as the client takes."""
    defended.receive({**received.params, **received.buffers})
    here = rng.child("round", received.round)
    chosen, steps = plan_batches(len(examples), LOCAL, rng=here.child("batches"))
    optimizer = torch.optim.SGD(defended.model.parameters(), lr=LOCAL.learning_rate)
    rates = defended.start_round(LOCAL.learning_rate, len(steps), steps_per_epoch=LOCAL.steps_per_epoch(len(examples)))
    for step, rate in zip(steps, rates, strict=True):
        batch = examples.batch(chosen[step])
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        defended.loss(defended.model(batch.inputs), batch.targets).backward()
        defended.protect(batch.inputs, batch.targets)
        optimizer.step()
    return defended.finish_round()


@pytest.mark.parametrize(
    "defense",
    [
        Defense(),
        AdditiveNoise(),
        DpSgd(noise_multiplier=0.0, clip_norm=0.5),
        Lrp(),
        AdaDefense(),
        FedKl(key_length=8),
        Precode(latent_size=4),
        Stack(parts=(FedKl(key_length=8), AdditiveNoise(), AdaDefense())),
    ],
    ids=lambda defense: type(defense).__name__,
)
def test_the_update_is_the_clients_to_the_bit(
    defense: Defense, examples: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "brings", "the same")  # a loop of one's own has no hash of the data
    monkeypatch.setattr(Defended, "_round_identity", "the same")
    if isinstance(defense, DpSgd):
        pytest.importorskip("opacus")
    client, state = make_client(defense, examples), None
    defended = make_defended(defense, examples, rng=replayed(3))
    shared = client.trainer.model
    broadcast = Broadcast(cloned(parameters_of(shared)), cloned(buffers_of(shared)), 0)
    for round_index in range(2):
        received = Broadcast(broadcast.params, broadcast.buffers, round_index)
        done = client.train_round(Train(received, LOCAL.learning_rate), state)
        ours = own_loop(defended, examples, replayed(3), received)
        theirs, state = done.trained.update, done.state
        assert digest(ours.tensors) == digest(theirs.tensors)
        assert digest(ours.buffers or {}) == digest(theirs.buffers or {})
        assert ours.num_examples == theirs.num_examples
        private = {**state.params, **state.buffers}
        assert digest(defended.state_dict()["private"]) == digest(private)
        timeless = {name: value for name, value in done.report.items() if not name.endswith("seconds")}
        own = {name: value for name, value in defended.metrics.items() if not name.endswith("seconds")}
        assert own == {name: value for name, value in timeless.items() if name not in ("loss", "steps")}


@pytest.mark.parametrize(
    "defense", [FedKl(key_length=8), AdaDefense(), AdditiveNoise()], ids=lambda d: type(d).__name__
)
def test_state_survives_the_process(defense: Defense, examples: Examples) -> None:
    shared = make_client(defense, examples).trainer.model
    rounds = [Broadcast(cloned(parameters_of(shared)), cloned(buffers_of(shared)), index) for index in range(2)]
    whole = make_defended(defense, examples, rng=replayed(3))
    for received in rounds:
        expected = own_loop(whole, examples, replayed(3), received)
    first = make_defended(defense, examples, rng=replayed(3))
    own_loop(first, examples, replayed(3), rounds[0])
    stored = unpack(pack(first.state_dict()))
    # The key must come from the state: a wrapper in another process draws another one.
    second = make_defended(defense, examples, rng=replayed(99), state=stored)
    second.rng = replayed(3)
    assert digest(own_loop(second, examples, replayed(3), rounds[1]).tensors) == digest(expected.tensors)


def test_the_given_model_is_not_touched_and_entropy_is_fresh(examples: Examples) -> None:
    model = network()
    before = digest(parameters_of(model))
    received = Broadcast(cloned(parameters_of(model)), {}, 0)
    updates = [
        own_loop(
            wrap(AdditiveNoise(), model, num_examples=len(examples), num_classes=3), examples, replayed(3), received
        ).tensors
        for _ in range(2)
    ]
    assert digest(updates[0]) != digest(updates[1]), "two wrappers drew the same noise"
    assert digest(parameters_of(model)) == before


def test_a_gradient_may_be_sent_instead_of_a_change(examples: Examples) -> None:
    defended = make_defended(Defense(), examples)
    batch = examples.batch()
    defended.model.eval()
    defended.start_round(0.1, 1)
    defended.loss(defended.model(batch.inputs), batch.targets).backward()
    expected = {name: each.grad.clone() for name, each in defended.model.named_parameters() if each.grad is not None}
    defended.protect(batch.inputs, batch.targets)
    update = defended.finish_round(kind="gradient")
    assert update.kind == "gradient"
    assert digest(update.tensors) == digest(expected)


@dataclass(frozen=True)
class Darkening(Defense):
    """Halves the brightness of what is trained on."""

    def on_batch(self, batch: Batch, state: State, *, rng: Rng, report: Report) -> tuple[Batch, State]:
        return Batch(batch.inputs / 2, batch.targets), state


def test_changed_batches_must_be_the_ones_trained_on(examples: Examples) -> None:
    defended = make_defended(Darkening(), examples)
    batch = examples.batch()
    defended.start_round(0.1, 1)
    with pytest.raises(UsageError, match=r"Darkening changes batches: call batch\(\)"):
        defended.protect(batch.inputs, batch.targets)
    defended.abandon_round()
    defended.start_round(0.1, 1)
    inputs, targets = defended.batch(batch.inputs, batch.targets)
    assert torch.equal(inputs, batch.inputs / 2)
    defended.loss(defended.model(inputs), targets).backward()
    defended.protect(inputs, targets)
    assert defended.finish_round().tensors


def broken_round(defended: Defended, batch: Batch) -> None:
    defended.start_round(0.1, 1)
    defended.loss(defended.model(batch.inputs), batch.targets).backward()
    defended.protect(batch.inputs, batch.targets)
    with torch.no_grad():
        for parameter in defended.model.parameters():
            parameter.fill_(float("nan"))


def test_nothing_comes_out_of_a_round_that_is_not_finite(examples: Examples) -> None:
    defended = make_defended(FedKl(key_length=8), examples)
    before = digest({**parameters_of(defended.model), **buffers_of(defended.model)})
    state = pack(defended.state_dict())
    broken_round(defended, examples.batch())
    with pytest.raises(LeaktightError, match="is not finite; there is nothing to send"):
        defended.finish_round()
    assert digest({**parameters_of(defended.model), **buffers_of(defended.model)}) == before
    assert pack(defended.state_dict()) == state


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda defended, batch: defended.protect(*batch), "expected a round in progress"),
        (lambda defended, batch: defended.finish_round(), "expected a round in progress"),
        (lambda defended, batch: (defended.start_round(0.1, 1), defended.finish_round()), "expected 1 protected steps"),
        (
            lambda defended, batch: (defended.start_round(0.1, 1), defended.state_dict()),
            "no round in progress",
        ),
        (lambda defended, batch: (defended.start_round(0.1, 1), defended.receive({})), "no round in progress"),
        (lambda defended, batch: defended.start_round(0.1, 0), "expected steps >= 1, got 0"),
        (
            lambda defended, batch: defended.receive({"head": torch.ones(1)}),
            "expected tensors of the model, got 'head'",
        ),
    ],
)
def test_calls_out_of_order_say_what_is_missing(
    act: Callable[[Defended, tuple[torch.Tensor, torch.Tensor]], object], message: str, examples: Examples
) -> None:
    batch = examples.batch()
    with pytest.raises(UsageError, match=message):
        act(make_defended(Defense(), examples), (batch.inputs, batch.targets))


def test_more_steps_than_planned_are_refused(examples: Examples) -> None:
    defended = make_defended(Defense(), examples)
    batch = examples.batch()
    defended.start_round(0.1, 1)
    defended.protect(batch.inputs, batch.targets)
    with pytest.raises(UsageError, match=r"expected 1 steps in the round, as given to start_round\(\), got more"):
        defended.protect(batch.inputs, batch.targets)


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_example_of_the_documentation_runs() -> None:
    (code,) = code_blocks(PAGE.read_text())
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    update, model = names["update"], names["model"]
    received: Params = parameters_of(model)
    assert isinstance(update, Update)
    assert set(update.tensors) == set(received)
    assert digest(update.tensors) != digest({name: torch.zeros_like(tensor) for name, tensor in received.items()})


def one_batch(defended: Defended, examples: Examples, times: int, **said: int) -> Update:
    """A round in which the same examples make every batch."""
    batch = examples.batch(slice(0, 4))
    optimizer = torch.optim.SGD(defended.model.parameters(), lr=0.01)
    defended.start_round(0.01, times, **said)
    for _ in range(times):
        optimizer.zero_grad()
        defended.loss(defended.model(batch.inputs), batch.targets).backward()
        defended.protect(batch.inputs, batch.targets)
        optimizer.step()
    return defended.finish_round()


def test_a_batch_that_comes_fifty_times_costs_fifty_uses(examples: Examples) -> None:
    pytest.importorskip("opacus")
    defended = make_defended(DpSgd(noise_multiplier=1.0), examples)
    one_batch(defended, examples, 50)
    assert defended.metrics["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(50), 1e-5))
    assert defended.metrics["epsilon"] == pytest.approx(54.4, rel=0.01)
    assert defended.spent == Spent(defended.metrics["epsilon"], 1e-5)


def test_who_says_that_examples_come_once_an_epoch_is_held_to_it(examples: Examples) -> None:
    pytest.importorskip("opacus")
    defended = make_defended(DpSgd(), examples)
    with pytest.raises(UsageError, match="expected every example once in an epoch of 3 steps, got one a second time"):
        one_batch(defended, examples, 3, steps_per_epoch=3)
    defended.abandon_round()
    one_batch(defended, examples, 3, steps_per_epoch=1)
    assert defended.metrics["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(3), 1e-5))
    one_batch(make_defended(AdditiveNoise(), examples), examples, 3, steps_per_epoch=3)  # which promises nothing


def test_a_networks_own_noise_is_secret_in_a_users_loop_too(examples: Examples) -> None:
    """PRECODE's noise, and dropout: whoever knows the seed of PyTorch's generator learns nothing about them."""

    def seeded(defended: Defended) -> torch.Tensor:
        batch = examples.batch(slice(0, 4))
        defended.start_round(0.1, 1)
        with global_seed(Rng(1)):
            outputs = defended.loss(defended.model(batch.inputs), batch.targets)
            assert torch.equal(torch.rand(3), seeded_numbers()), "the user's own generator is left alone"
        return outputs.detach()

    def seeded_numbers() -> torch.Tensor:
        with global_seed(Rng(1)):
            return torch.rand(3)

    noisy = [seeded(make_defended(Precode(latent_size=4), examples)) for _ in range(2)]
    dropped = [seeded(make_defended(Defense(), examples)) for _ in range(2)]
    for one, other in (noisy, dropped):
        assert not torch.equal(one, other)


def test_a_stored_or_copied_model_holds_no_secrets(examples: Examples) -> None:
    rng = replayed(3)
    defended = make_defended(Precode(latent_size=4), examples, rng=rng)
    defended.start_round(0.1, 1)
    for stored in (pickle.dumps(defended.model), pickle.dumps(copy.deepcopy(defended.model))):
        assert rng.key is not None
        assert rng.key not in stored
        batch = examples.batch(slice(0, 4))
        assert pickle.loads(stored)(batch.inputs) is not None
