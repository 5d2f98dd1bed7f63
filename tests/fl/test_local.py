from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.core.errors import ModelError, UsageError
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, digest, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Params, State
from leaktight.fl.local import Trainer, local_update, per_example_gradients, plan_batches

SETTINGS: dict[str, tuple[LocalTraining, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (LocalTraining(learning_rate=0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "decay": (LocalTraining(learning_rate=0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    "momentum": (
        LocalTraining(learning_rate=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        LocalTraining(learning_rate=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    ),
    "adam": (
        LocalTraining(learning_rate=0.1, optimizer="adam", weight_decay=0.01),
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.01),
    ),
}


def train(model: nn.Module, local: LocalTraining, batches: list[Batch], **options: Any) -> Any:
    return local_update(
        Trainer(model, local),
        parameters_of(model),
        buffers_of(model),
        batches,
        learning_rates=[local.learning_rate] * len(batches),
        **options,
    )


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("network_name", ["network", "normalised"])
def test_agrees_with_a_plain_pytorch_loop(
    name: str, network_name: str, batches: list[Batch], request: pytest.FixtureRequest
) -> None:
    model: nn.Module = request.getfixturevalue(network_name)
    local, make = SETTINGS[name]
    result = train(model, local, batches)
    plain = copy.deepcopy(model).train()
    optimizer = make(plain.parameters())
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(plain(batch.inputs), batch.targets).backward()
        optimizer.step()
    for key, tensor in parameters_of(plain).items():
        torch.testing.assert_close(result.params[key], tensor, rtol=1e-12, atol=1e-14)
    for key, tensor in buffers_of(plain).items():
        torch.testing.assert_close(result.buffers[key], tensor, rtol=1e-12, atol=1e-14)


def test_nothing_given_is_changed(normalised: nn.Module, batches: list[Batch]) -> None:
    normalised.eval()
    before, generator = digest(normalised.state_dict()), torch.get_rng_state()
    inputs = [batch.inputs.clone() for batch in batches]
    train(normalised, LocalTraining(momentum=0.9), batches)
    assert digest(normalised.state_dict()) == before
    assert not any(module.training for module in normalised.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(batch.inputs, copied) for batch, copied in zip(batches, inputs, strict=True))


def test_evaluation_mode_uses_and_keeps_the_running_statistics(normalised: nn.Module, batches: list[Batch]) -> None:
    trainer = Trainer(normalised, LocalTraining(), mode="eval")
    result = local_update(
        trainer, parameters_of(normalised), buffers_of(normalised), batches[:1], learning_rates=[0.01]
    )
    assert digest(result.buffers) == digest(buffers_of(normalised))
    reference = copy.deepcopy(normalised).eval()
    F.cross_entropy(reference(batches[0].inputs), batches[0].targets).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(result.gradient[name], parameter.grad)


@pytest.mark.parametrize("name", SETTINGS)
def test_an_attacker_can_differentiate_through_it(name: str, network: nn.Module, batches: list[Batch]) -> None:
    """The derivative of a function of the update with respect to the inputs, against finite differences."""
    local, _ = SETTINGS[name]
    received = parameters_of(network)

    def change(inputs: Tensor) -> Tensor:
        steps = [Batch(inputs, batches[0].targets), Batch(inputs.flip(0), batches[0].targets)]
        result = local_update(
            Trainer(network, local), received, {}, steps, learning_rates=[0.1, 0.1], create_graph=True
        )
        return sum((tensor.sin().sum() for tensor in result.update(received, "delta").values()), torch.zeros(()))

    inputs = batches[0].inputs[:2].clone().requires_grad_()
    targets = batches[0].targets[:2]
    batches[0] = Batch(batches[0].inputs, targets)
    assert torch.autograd.gradcheck(change, (inputs,), eps=1e-6, atol=1e-7)


def test_simulation_gives_the_clients_own_numbers(network: nn.Module, batches: list[Batch]) -> None:
    local = LocalTraining(momentum=0.9, weight_decay=0.01)
    plain, simulated = train(network, local, batches), train(network, local, batches, create_graph=True)
    assert digest(plain.params) == digest(simulated.params)


def test_one_step_of_sgd_makes_the_two_kinds_of_update_agree(network: nn.Module, batches: list[Batch]) -> None:
    received = parameters_of(network)
    result = train(network, LocalTraining(learning_rate=0.1), batches[:1])
    gradient, delta = result.update(received, "gradient"), result.update(received, "delta")
    for name in received:
        torch.testing.assert_close(delta[name], -0.1 * gradient[name])


def test_per_example_gradients_average_to_the_batch_gradient(network: nn.Module, batches: list[Batch]) -> None:
    trainer = Trainer(network, LocalTraining())
    each = per_example_gradients(trainer, parameters_of(network), {}, batches[0])
    whole = train(network, LocalTraining(), batches[:1]).gradient
    for name, tensor in whole.items():
        assert each[name].shape == (5, *tensor.shape)
        torch.testing.assert_close(each[name].mean(0), tensor)


def test_per_example_gradients_are_refused_under_batch_statistics(normalised: nn.Module, batches: list[Batch]) -> None:
    trainer = Trainer(normalised, LocalTraining())
    with pytest.raises(ModelError, match="batch normalisation in training mode"):
        per_example_gradients(trainer, parameters_of(normalised), buffers_of(normalised), batches[0])


def test_a_parameter_that_the_loss_does_not_use_gets_a_zero_gradient(batches: list[Batch]) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(12, 3).double(), nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.used(inputs.flatten(1))
            return result

    assert train(Unused(), LocalTraining(), batches[:1]).gradient["spare"].tolist() == [0.0, 0.0]


@dataclass(frozen=True)
class Diary(Defense):
    """Writes down its calls in its state and doubles every gradient."""

    def on_batch(self, batch: Batch, state: State, *, rng: Rng, report: Report) -> tuple[Batch, State]:
        return batch, {"calls": [*state.get("calls", []), "batch"]}

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        assert step.per_example()["1.weight"].shape[0] == len(step.batch)
        report("norm", 1.0)
        doubled = {name: 2 * tensor for name, tensor in step.gradient.items()}
        return doubled, {"calls": [*state["calls"], f"gradient {step.index} {rng.path}"]}


def test_hooks_run_in_order_and_their_gradient_is_the_one_applied(network: nn.Module, batches: list[Batch]) -> None:
    local = LocalTraining(learning_rate=0.1)
    seen: list[str] = []
    result = local_update(
        Trainer(network, local, defense=Diary()),
        parameters_of(network),
        {},
        batches[:2],
        learning_rates=[0.1, 0.1],
        rng=replayed(0),
        report=lambda name, value: seen.append(name),
    )
    assert result.state["calls"] == [
        "batch",
        "gradient 0 ('step', 0, 'gradient')",
        "batch",
        "gradient 1 ('step', 1, 'gradient')",
    ]
    assert seen.count("norm") == 2
    plain = local_update(Trainer(network, local), parameters_of(network), {}, batches[:1], learning_rates=[0.2])
    first = local_update(
        Trainer(network, local, defense=Diary()), parameters_of(network), {}, batches[:1], learning_rates=[0.1]
    )
    for name in plain.params:
        torch.testing.assert_close(first.params[name], plain.params[name])


@dataclass(frozen=True)
class Recomputing(Defense):
    """Puts the gradient of the step's own loss function in place of the gradient, and wants the input's too."""

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        before = digest(step.buffers)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in step.params.items()}
        inputs = step.batch.inputs.clone().requires_grad_()
        loss = step.loss(leaves, Batch(inputs, step.batch.targets))
        *gradients, moved = torch.autograd.grad(loss, [*leaves.values(), inputs])
        assert moved.shape == inputs.shape
        assert digest(step.buffers) == before, "the statistics stay put"
        return dict(zip(leaves, gradients, strict=True)), state


def test_a_step_can_compute_its_loss_again(normalised: nn.Module, batches: list[Batch]) -> None:
    results = [
        local_update(
            Trainer(normalised, LocalTraining(), defense=defense),
            parameters_of(normalised),
            buffers_of(normalised),
            batches,
            learning_rates=[0.1] * len(batches),
            loss_scale=0.7,
        )
        for defense in (Defense(), Recomputing())
    ]
    for name, tensor in results[0].params.items():
        torch.testing.assert_close(results[1].params[name], tensor)
    assert digest(results[0].buffers) == digest(results[1].buffers)


@given(
    num_examples=st.integers(1, 60),
    samples=st.none() | st.integers(1, 60),
    batch_size=st.integers(1, 20),
    epochs=st.integers(1, 3),
    steps=st.none() | st.integers(1, 12),
    drop_last=st.booleans(),
)
def test_planned_batches_cover_the_chosen_examples(
    num_examples: int, samples: int | None, batch_size: int, epochs: int, steps: int | None, drop_last: bool
) -> None:
    used = min(samples or num_examples, num_examples)
    if batch_size > used:
        return
    local = LocalTraining(epochs=epochs, samples=samples, batch_size=batch_size, steps=steps, drop_last=drop_last)
    chosen, plan = plan_batches(num_examples, local, rng=replayed(0))
    assert len(set(chosen.tolist())) == len(chosen) == used
    assert len(plan) == local.num_steps(num_examples)
    per_epoch = local.steps_per_epoch(num_examples)
    for start in range(0, len(plan) - per_epoch + 1, per_epoch):
        places = torch.cat(plan[start : start + per_epoch]).tolist()
        assert len(set(places)) == len(places)
        assert len(places) == (used // batch_size * batch_size if drop_last else used)


def test_a_batch_larger_than_the_data_is_an_error() -> None:
    with pytest.raises(UsageError, match="batch_size 8 > 5"):
        plan_batches(5, LocalTraining(batch_size=8), rng=replayed(0))
