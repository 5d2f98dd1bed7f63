from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.core.errors import OutsideBudgetError, RefusedError, UsageError
from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.protocols import ClientFacts, Conversation, Defense, Question, Report, RoundPlan, Step
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import buffers_of, digest, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Examples, Params, State, Update
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.clipping import Clipping
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.fedkl import FedKl
from leaktight.defenses.graddefense import GradDefense
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.outpost import Outpost
from leaktight.defenses.precode import Precode
from leaktight.defenses.soteria import Soteria
from leaktight.defenses.stack import Stack
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client, ClientRound
from leaktight.fl.local import Trainer, silent
from leaktight.fl.messages import Ask, Train
from leaktight.fl.plan import Setup

FACTS = ClientFacts("a", 12, 3)


@dataclass(frozen=True, kw_only=True)
class Affine(Defense):
    """Adds and multiplies wherever it can, so that the order shows."""

    add: float = 0.0
    times: float = 1.0

    def _of(self, tensors: Params) -> dict[str, Tensor]:
        return {name: self.times * tensor + self.add for name, tensor in tensors.items()}

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        return model, {"calls": 0}

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        rates = tuple(self.times * rate + self.add for rate in plan.learning_rates)
        return replace(plan, learning_rates=rates), {"calls": state["calls"] + 1}

    def on_batch(self, batch: Batch, state: State, *, rng: Rng, report: Report) -> tuple[Batch, State]:
        return Batch(self.times * batch.inputs + self.add, batch.targets), state

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        report("times", self.times)
        return self._of(step.gradient), state

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        return replace(update, tensors=self._of(update.tensors)), state

    def on_aggregate(self, change: Params, num_clients: int, state: State) -> tuple[Params, State]:
        undone = {name: (tensor - self.add) / self.times for name, tensor in change.items()}
        return undone, {"rounds": state.get("rounds", 0) + num_clients}


@dataclass(frozen=True)
class PerExample(Defense):
    """Asks for what every example contributed."""

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        return {name: rows.mean(0) for name, rows in step.per_example().items()}, state


@dataclass(frozen=True, kw_only=True)
class Summing(Defense):
    """Sums a number of every client through two rounds of questions."""

    factor: int = 1

    def agree(self, clients: Sequence[str]) -> Conversation[None]:
        numbers = yield {client: Question("number", {}) for client in clients}
        total = sum(answer["number"] for answer in numbers.values())
        yield {client: Question("total", {"total": total}) for client in clients}

    def answer(self, question: Question, state: State, facts: ClientFacts, *, rng: Rng) -> tuple[State, State]:
        if question.kind == "number":
            return {"number": self.factor * facts.num_examples}, state
        return {}, {**state, "total": question.payload["total"]}


def step_of(gradient: Params) -> Step:
    return Step(
        index=0,
        round=0,
        model=nn.Identity(),
        params={},
        buffers={},
        batch=Batch(torch.zeros(2, 1), torch.zeros(2)),
        gradient=gradient,
        learning_rate=0.1,
        per_example=lambda: {name: torch.stack([tensor, tensor]) for name, tensor in gradient.items()},
    )


def started(stack: Stack) -> State:
    return stack.start(nn.Identity(), FACTS, rng=replayed(0))[1]


def gradient_of(stack: Stack, gradient: Params, report: Report = silent) -> Params:
    return stack.on_gradient(step_of(gradient), started(stack), rng=replayed(1), report=report)[0]


DOUBLE_THEN_ADD = Stack(parts=(Affine(times=2.0), Affine(add=1.0)))


def test_every_hook_runs_through_the_parts_in_order() -> None:
    stack, state = DOUBLE_THEN_ADD, started(DOUBLE_THEN_ADD)
    ones = {"w": torch.ones(3)}
    plan, state = stack.on_round(RoundPlan(0, (1.0, 2.0)), state, rng=replayed(0), report=silent)
    assert plan.learning_rates == (3.0, 5.0)
    assert state == {"affine": {"calls": 1}, "affine_2": {"calls": 1}}
    batch, _ = stack.on_batch(Batch(torch.ones(2), torch.ones(2)), state, rng=replayed(0), report=silent)
    assert batch.inputs.tolist() == [3.0, 3.0]
    assert gradient_of(stack, ones)["w"].tolist() == [3.0] * 3
    update, _ = stack.on_update(Update(ones, "delta"), state, rng=replayed(0), report=silent)
    assert update.tensors["w"].tolist() == [3.0] * 3


def test_the_server_takes_off_last_what_was_put_on_first() -> None:
    sent = {"w": torch.full((3,), 3.0)}  # 2 * 1 + 1, see above
    change, state = DOUBLE_THEN_ADD.on_aggregate(sent, 5, {})
    assert change["w"].tolist() == [1.0] * 3
    _, state = DOUBLE_THEN_ADD.on_aggregate(sent, 5, state)
    assert state == {"affine": {"rounds": 10}, "affine_2": {"rounds": 10}}


def test_a_part_reports_under_its_own_name_and_its_time_is_summed_there() -> None:
    said: list[tuple[str, float]] = []
    stack = Stack(parts=(*DOUBLE_THEN_ADD.parts, AdditiveNoise()))
    gradient_of(stack, {"w": torch.ones(3)}, lambda name, value: said.append((name, value)))
    figures = dict(said)
    assert figures["affine.times"] == 2.0
    assert figures["affine_2.times"] == 1.0
    assert figures["noise.noise_std"] == 0.1
    assert {name for name in figures if name.endswith("_seconds")} == {
        "affine_seconds",
        "affine_2_seconds",
        "noise_seconds",
    }
    assert min(figures.values()) >= 0


def test_two_noises_are_independent_and_a_part_more_shifts_no_stream() -> None:
    zeros = {"w": torch.zeros(20_000)}
    one = gradient_of(Stack(parts=(AdditiveNoise(noise_std=1.0),)), zeros)["w"]
    two = gradient_of(Stack(parts=(AdditiveNoise(noise_std=1.0), AdditiveNoise(noise_std=1.0))), zeros)["w"]
    second = two - one
    assert float(second.std()) == pytest.approx(1.0, abs=0.05)
    assert abs(float((one * second).mean())) < 0.05, "correlated"


def test_the_gradients_of_examples_are_gone_once_their_mean_was_changed() -> None:
    ones = {"w": torch.ones(3)}
    assert gradient_of(Stack(parts=(Defense(), PerExample(), Affine(add=1.0))), ones)["w"].tolist() == [2.0] * 3
    message = "per_example needs the gradient of each example, but affine before it .*put per_example before affine"
    with pytest.raises(UsageError, match=message):
        gradient_of(Stack(parts=(Affine(add=1.0), PerExample())), ones)
    with pytest.raises(UsageError, match="per_example_2 needs"):
        gradient_of(Stack(parts=(PerExample(), PerExample())), ones)


def test_questions_find_their_part() -> None:
    stack = Stack(parts=(Summing(), Affine(), Summing(factor=10)))
    facts = {name: ClientFacts(name, size, 2) for name, size in (("a", 1), ("b", 2))}
    states = {name: stack.start(nn.Identity(), each, rng=replayed(0))[1] for name, each in facts.items()}
    conversation = stack.agree(sorted(facts))
    asked = []
    answers: dict[str, Any] | None = None
    with contextlib.suppress(StopIteration):
        while True:
            questions = next(conversation) if answers is None else conversation.send(answers)
            answers = {}
            for name, question in questions.items():
                asked.append(question.kind)
                answers[name], states[name] = stack.answer(question, states[name], facts[name], rng=replayed(0))
    assert states["a"] == {"summing": {"total": 3}, "affine": {"calls": 0}, "summing_2": {"total": 30}}
    assert asked[::2] == ["summing:number", "summing:total", "summing_2:number", "summing_2:total"]
    with pytest.raises(ValueError, match="no part of the stack has an answer to 'number'"):
        stack.answer(Question("number", {}), states["a"], facts["a"], rng=replayed(0))


def test_an_empty_stack_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least one defense in parts, got none"):
        Stack(parts=())


def trained(defense: Defense) -> tuple[Client, ClientRound]:
    with global_seed(replayed(0)):
        plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model = defense.prepare(plain, rng=replayed(1))
    generator = replayed(2).public()
    examples = Examples(
        torch.randint(256, (12, 3, 4, 4), generator=generator, dtype=torch.uint8),
        torch.randint(3, (12,), generator=generator),
    )
    trainer = Trainer(model, LocalTraining(batch_size=4, learning_rate=0.1), defense=defense)
    client = Client("a", examples, examples, Setup(trainer, FedAvg()), replayed(3))
    request = Train(Broadcast(parameters_of(model), buffers_of(model), 0), learning_rate=0.1)
    return client, client.train_round(request, None)


def test_private_modules_and_shared_ones_stack() -> None:
    _, done = trained(Stack(parts=(FedKl(), Precode(latent_size=4), AdditiveNoise())))
    assert any("lock" in name for name in done.state.params)
    assert not any("lock" in name for name in done.trained.update.tensors)
    assert any("bottleneck" in name for name in done.trained.update.tensors)
    assert set(done.state.defense) == {"fedkl", "precode", "noise"}
    assert Stack(parts=(Precode(), FedKl())).private_parts
    assert not Stack(parts=(Precode(),)).private_parts


def test_a_stack_of_one_is_that_defense_up_to_its_draws() -> None:
    clip_only = DpSgd(noise_multiplier=0.0, clip_norm=0.1)
    (_, alone), (_, stacked) = trained(clip_only), trained(Stack(parts=(clip_only,)))
    assert digest(alone.trained.update.tensors) == digest(stacked.trained.update.tensors)
    assert stacked.report["dp_sgd.clip_rate"] == alone.report["clip_rate"]


def test_the_budget_of_a_part_is_reported_as_its_own() -> None:
    pytest.importorskip("opacus")
    client, done = trained(Stack(parts=(DpSgd(), AdditiveNoise())))
    assert done.report["dp_sgd.epsilon"] > 0
    with pytest.raises(RefusedError, match="asked 'lrp_key', which was not agreed on"):
        client.handle(Ask(Question("lrp_key", {}), "defense"), done.state)


@pytest.mark.parametrize("later", [Soteria(), GradDefense(), Clipping(scope="example")], ids=lambda d: type(d).__name__)
def test_what_looks_at_the_data_after_a_private_part_is_refused(later: Defense) -> None:
    pytest.importorskip("opacus")
    with pytest.raises((OutsideBudgetError, UsageError), match="in the stack"):
        trained(Stack(parts=(DpSgd(), later)))
    trained(Stack(parts=(ClientDp(), later)))  # which looks at the update alone, after everything else


def test_a_stack_is_private_if_a_part_is_and_spends_what_it_spends() -> None:
    pytest.importorskip("opacus")
    stack = Stack(parts=(DpSgd(noise_multiplier=2.0), Outpost(), ClientDp(noise_multiplier=1.0)))
    _, done = trained(stack)
    spent = stack.spent(done.state.defense)
    assert stack.private
    assert spent is not None
    assert spent.epsilon == pytest.approx(gaussian_epsilon(1.0, 1e-5))
    assert not Stack(parts=(Outpost(), DpSgd(noise_multiplier=0.0))).private
