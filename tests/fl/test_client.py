from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import LeaktightError
from leaktight.core.protocols import Asked, ClientFacts, Defense, Member, Question, Report, RoundPlan, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, digest, pack, parameters_of, unpack
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Examples, Params, State, Update
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client
from leaktight.fl.consent import Agreement
from leaktight.fl.local import Trainer
from leaktight.fl.messages import Answered, Ask, Evaluate, Evaluated, Train, Trained, decode, encode
from leaktight.fl.plan import Setup
from leaktight.fl.state import ClientState


def make_client(model: nn.Module, examples: Examples, defense: Defense | None = None, name: str = "a") -> Client:
    local = LocalTraining(epochs=2, batch_size=8, learning_rate=0.1)
    return Client(
        name=name,
        train=examples,
        validation=examples.take(torch.arange(10)),
        setup=Setup(Trainer(model, local, defense=defense or Defense()), FedAvg()),
        rng=replayed(0).child("client", name),
    )


def request(model: nn.Module, round_index: int = 0) -> Train:
    return Train(Broadcast(parameters_of(model), buffers_of(model), round_index), learning_rate=0.1)


@pytest.fixture
def model(normalised: nn.Module) -> nn.Module:
    return normalised.float()


def test_the_truth_is_what_was_trained_on(model: nn.Module, examples: Examples) -> None:
    done = make_client(model, examples).train_round(request(model), None)
    assert len(done.truth().examples) == len(examples) == done.trained.update.num_examples
    assert len(done.truth().steps) == 10
    rows = {tuple(row.flatten().tolist()) for row in examples.batch().inputs}
    assert {tuple(row.flatten().tolist()) for row in done.truth().examples.inputs} == rows
    assert set(done.truth().learning_rates) == {0.1}


def test_the_same_request_gives_the_same_bytes_and_another_round_others(model: nn.Module, examples: Examples) -> None:
    client = make_client(model, examples)
    first, again = client.train_round(request(model), None), client.train_round(request(model), None)
    assert digest(first.trained.update.tensors) == digest(again.trained.update.tensors)
    later = client.train_round(request(model, 1), first.state)
    assert digest(first.trained.update.tensors) != digest(later.trained.update.tensors)


def keeping(client: Client, *, redraw: bool) -> Client:
    """The client with 5 of its examples in a round."""
    local = LocalTraining(samples=5, batch_size=5, learning_rate=0.1, redraw=redraw)
    trainer = replace(client.trainer, local=local)
    return replace(client, setup=replace(client.setup, trainer=trainer))


def test_examples_are_drawn_again_every_round_or_kept(model: nn.Module, examples: Examples) -> None:
    drawn: dict[bool, list[torch.Tensor]] = {}
    for redraw in (True, False):
        client, state = keeping(make_client(model, examples), redraw=redraw), None
        for number in range(3):
            done = client.train_round(request(model, number), state)
            state = done.state
            drawn.setdefault(redraw, []).append(done.truth().examples.inputs)
    again, kept = drawn[True], drawn[False]
    assert all(torch.equal(kept[0], each) for each in kept)
    assert not any(torch.equal(again[0], each) for each in again[1:])
    assert torch.equal(again[0], kept[0]), "the first round is the same"


def test_keeping_examples_changes_the_noise(model: nn.Module, examples: Examples) -> None:
    """Otherwise two updates that differ in this setting alone would differ by their examples and no noise."""
    client = make_client(model, examples)
    assert keeping(client, redraw=True).brings != keeping(client, redraw=False).brings


def test_messages_survive_the_wire(model: nn.Module, examples: Examples) -> None:
    client = make_client(model, examples)
    sent = decode(encode({"request": request(model)}))["request"]
    done = client.train_round(sent, None)
    assert digest(done.trained.update.tensors) == digest(
        client.train_round(request(model), None).trained.update.tensors
    )
    back = decode(encode({"reply": done.trained, "truth": done.truth()}))
    assert digest(back["reply"].update.tensors) == digest(done.trained.update.tensors)
    assert torch.equal(back["truth"].examples.inputs, done.truth().examples.inputs)


def test_foreign_bytes_are_a_named_error() -> None:
    with pytest.raises(LeaktightError, match="not a message"):
        decode(b"x" * 40)


@dataclass(frozen=True)
class Withholding(Defense):
    """Keeps the first layer at home."""

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        kept = {name: tensor for name, tensor in update.tensors.items() if not name.startswith("0.")}
        statistics = {name: tensor for name, tensor in (update.buffers or {}).items() if "running_mean" not in name}
        return replace(update, tensors=kept, buffers=statistics), {"rounds": state.get("rounds", 0) + 1}


def test_what_a_defense_withholds_stays_with_the_client(model: nn.Module, examples: Examples) -> None:
    client = make_client(model, examples, Withholding())
    first = client.train_round(request(model), None)
    assert set(first.state.params) == {"0.weight", "0.bias"}
    assert set(first.state.buffers) == {"1.running_mean"}
    assert first.state.defense == {"rounds": 1}
    second = client.train_round(request(model, 1), first.state)
    assert not torch.equal(second.state.params["0.weight"], first.state.params["0.weight"])
    fresh = client.train_round(request(model, 1), None)
    assert digest(fresh.trained.update.tensors) != digest(second.trained.update.tensors), "the private layer was used"


@dataclass(frozen=True)
class Growing(Defense):
    """Adds a private scale to the network."""

    @property
    def questions(self) -> Mapping[str, Asked]:
        return {"classes": Asked("a test", ("classes",))}

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        model.register_parameter("secret", nn.Parameter(torch.rand(3, generator=rng.public())))
        return model, {"examples": facts.num_examples}

    def answer(self, question: Question, state: State, facts: ClientFacts, *, rng: Rng) -> tuple[State, State]:
        return {"classes": facts.num_classes}, {**state, "asked": True}

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        tensors = {name: tensor for name, tensor in update.tensors.items() if name != "secret"}
        return replace(update, tensors=tensors), state


def test_private_modules_belong_to_one_client(model: nn.Module, examples: Examples) -> None:
    ours, theirs = (make_client(model, examples, Growing(), name) for name in ("a", "b"))
    first, other = ours.train_round(request(model), None), theirs.train_round(request(model), None)
    assert "secret" not in first.trained.update.tensors
    assert not torch.equal(first.state.params["secret"], other.state.params["secret"])
    assert "secret" not in parameters_of(model)
    reply, state = ours.handle(Ask(Question("classes", {}), "defense"), first.state)
    assert reply == Answered({"classes": 3})
    assert state.defense["asked"] is True


@dataclass(frozen=True)
class Secretive(Defense):
    """Draws a secret for every question."""

    @property
    def questions(self) -> Mapping[str, Asked]:
        return {"key": Asked("a test", ("secret",), each_round=True), "first": Asked("a test", ("secret",))}

    def answer(self, question: Question, state: State, facts: ClientFacts, *, rng: Rng) -> tuple[State, State]:
        return {"secret": rng.secret_bytes()}, state


@dataclass(frozen=True, kw_only=True)
class SecretiveFedAvg(FedAvg):
    """Draws a secret for every question, too."""

    @property
    def questions(self) -> Mapping[str, Asked]:
        return {kind: Asked("a test", ("secret",), each_round=True) for kind in ("key", "share")}

    def answer(self, question: Question, state: State, member: Member, *, rng: Rng) -> tuple[State, State]:
        return {"secret": rng.secret_bytes()}, state


def test_every_question_is_answered_from_a_stream_of_its_own(model: nn.Module, examples: Examples) -> None:
    """The same question in two rounds, of both sides, and others: no secret comes twice."""
    client = make_client(model, examples, Secretive())
    client = replace(client, setup=replace(client.setup, aggregator=SecretiveFedAvg()))

    def secrets_of_two_rounds() -> list[bytes]:
        reply, state = client.handle(Ask(Question("first", {}), "defense"), None)
        replies = [reply]
        for number in range(2):
            _, state = client.handle(request(model, number), ClientState.restored(unpack(pack(state.stored()))))
            for ask in (
                Ask(Question(f"key/{number}", {}), "defense"),
                Ask(Question(f"key/{number}", {}), "aggregator"),
                Ask(Question(f"share/{number}", {}), "aggregator"),
            ):
                reply, state = client.handle(ask, state)
                replies.append(reply)
        return [reply.payload["secret"] for reply in replies if isinstance(reply, Answered)]

    secrets = secrets_of_two_rounds()
    assert len(set(secrets)) == 7
    assert secrets_of_two_rounds() == secrets, "and a run can be repeated"


@dataclass(frozen=True)
class Halving(Defense):
    """Halves the learning rate of every second step."""

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        rates = tuple(rate / (1 + place % 2) for place, rate in enumerate(plan.learning_rates))
        report("mean_rate", sum(rates) / len(rates))
        return replace(plan, learning_rates=rates), state


def test_a_defense_may_change_the_learning_rates(model: nn.Module, examples: Examples) -> None:
    done = make_client(model, examples, Halving()).train_round(request(model), None)
    assert done.truth().learning_rates[:2] == (0.1, 0.05)
    assert done.report["mean_rate"] == pytest.approx(0.075)


@dataclass(frozen=True)
class Breaking(Defense):
    """Sends nonsense."""

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        return {name: tensor / 0 for name, tensor in step.gradient.items()}, state


def test_an_update_that_is_not_finite_is_never_sent(model: nn.Module, examples: Examples) -> None:
    with pytest.raises(LeaktightError, match="is not finite; nothing was sent"):
        make_client(model, examples, Breaking()).train_round(request(model), None)


def test_evaluation_counts_the_validation_examples(model: nn.Module, examples: Examples) -> None:
    client = replace(make_client(model, examples), agreement=Agreement(scores_on="validation"))
    reply, _ = client.handle(Evaluate(request(model).broadcast), None)
    assert isinstance(reply, Evaluated)
    held_out = examples.take(torch.arange(10)).batch()
    with torch.no_grad():
        logits = model.eval()(held_out.inputs)
    assert reply.num_examples == 10
    assert reply.num_correct == int((logits.argmax(1) == held_out.targets).sum())
    assert reply.loss == pytest.approx(float(nn.functional.cross_entropy(logits, held_out.targets)), rel=1e-5)


def test_handle_trains_too(model: nn.Module, examples: Examples) -> None:
    reply, state = make_client(model, examples).handle(request(model), None)
    assert isinstance(reply, Trained)
    assert list(state.stored()) == ["defense", "aggregator", "params", "buffers", "conduct", "guard"]
    assert list(state.stored()["conduct"]) == ["round", "rounds", "scored", "asked"], "as on disk"


@dataclass(frozen=True)
class Slow(Defense):
    """Takes its time at the end of a round."""

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        time.sleep(0.05)
        return update, state


def test_the_time_of_every_hook_counts_as_the_defenses(model: nn.Module, examples: Examples) -> None:
    done = make_client(model, examples, Slow()).train_round(request(model), None)
    assert done.report["seconds"] > done.report["defense_seconds"] >= 0.05
