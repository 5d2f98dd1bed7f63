"""What a client agrees to answer: every request beyond that is refused, and leaves no trace in its state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.defenses.dp_scenes import client_of, small_network
from tests.fl.talks import SMALL
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import OutsideBudgetError, RefusedError, UsageError
from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.protocols import Aggregator, Defense, Guard, Question
from leaktight.core.tensors import buffers_of, pack, parameters_of
from leaktight.core.training import Cosine, LocalTraining
from leaktight.core.types import Broadcast, State
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.fed_cdp import FedCdp
from leaktight.defenses.fedkl import FedKl
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.stack import Stack
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client
from leaktight.fl.consent import Agreement, Consent, agreed_rates
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.fedboosting import FedBoosting
from leaktight.fl.local import Trainer
from leaktight.fl.messages import Answered, Ask, Evaluate, Evaluated, Request, Train, Trained
from leaktight.fl.plan import FederationPlan, Server, Setup
from leaktight.fl.state import ClientState

AGREED = Agreement(rounds=3, learning_rates=(0.05, 0.1), loss_scales=(0.5, 2.0), clients=2)


@pytest.fixture
def model() -> nn.Module:
    return small_network().float()


def broadcast(model: nn.Module, number: int = 0, **changes: Any) -> Broadcast:
    return replace(Broadcast(parameters_of(model), buffers_of(model), number), **changes)


def client(
    model: nn.Module, defense: Defense | None = None, aggregator: Aggregator | None = None, **changes: Any
) -> Client:
    made = client_of(defense or Defense(), model)
    setup = replace(made.setup, aggregator=aggregator or made.setup.aggregator)
    return replace(made, **{"agreement": AGREED, "setup": setup, **changes})


def unchanged(who: Client, request: Request, state: ClientState | None, match: str) -> None:
    """The request is refused, with the client's state as it was."""
    before = None if state is None else pack(state.stored())
    with pytest.raises(RefusedError, match=match):
        who.handle(request, state)
    assert before is None or (state is not None and pack(state.stored()) == before)


def test_a_plan_that_is_kept_is_answered(model: nn.Module) -> None:
    who, state = client(model), None
    for number in (0, 2):  # it was not drawn in round 1
        reply, state = who.handle(Train(broadcast(model, number), 0.1), state)
        assert isinstance(reply, Trained)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kind": "gradient"}, "asked for a gradient, agreed on a delta"),
        ({"kind": "whole model"}, "asked for a whole model"),
        ({"learning_rate": -0.1}, "learning rate of -0.1, agreed on 0.05 to 0.1"),
        ({"learning_rate": 0.2}, "learning rate of 0.2"),
        ({"learning_rate": 0.0}, "learning rate of 0.0"),
        ({"learning_rate": math.nan}, "learning rate of nan"),
        ({"learning_rate": math.inf}, "learning rate of inf"),
        ({"learning_rate": "0.1"}, "learning rate of '0.1'"),
        ({"loss_scale": 3.0}, "loss scale of 3.0, agreed on 0.5 to 2"),
        ({"loss_scale": -1.0}, "loss scale of -1.0"),
    ],
)
def test_training_of_another_kind_is_refused(model: nn.Module, changes: Mapping[str, Any], match: str) -> None:
    unchanged(client(model), replace(Train(broadcast(model), 0.1), **changes), None, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"round": 3}, "asked for round 4 of 3"),
        ({"round": -1}, "not a round number"),
        ({"round": True}, "not a round number"),
        ({"round": 0.0}, "not a round number"),
        ({"params": {}}, "other tensors than the agreed network's"),
        ({"params": {"0.weight": torch.zeros(1)}}, "other tensors"),
    ],
)
def test_another_model_is_refused(model: nn.Module, changes: Mapping[str, Any], match: str) -> None:
    unchanged(client(model), Train(broadcast(model, **changes), 0.1), None, match)


def test_tensors_of_another_shape_or_type_are_refused(model: nn.Module) -> None:
    params = parameters_of(model)
    for other in (params["0.weight"].double(), params["0.weight"][:1]):
        asked = Train(broadcast(model, params={**params, "0.weight": other}), 0.1)
        unchanged(client(model), asked, None, "'0.weight' in another shape or type")


def test_a_round_is_answered_once_whatever_the_server_calls_it(model: nn.Module) -> None:
    """The same round twice, once with an all-zero model: the difference is the update, were the noise the same."""
    who = client(model, ClientDp())
    _, state = who.handle(Train(broadcast(model, 1), 0.1), None)
    zero = {name: torch.zeros_like(tensor) for name, tensor in parameters_of(model).items()}
    for number in (1, 0):
        unchanged(who, Train(broadcast(model, number, params=zero), 0.1), state, f"asked for round {number + 1} after")


def test_the_noise_of_a_round_hangs_on_what_was_asked(model: nn.Module) -> None:
    """Should a client ever be made to answer twice, the two answers share nothing."""
    who = client(model, AdditiveNoise(noise_std=5.0, at="update"))
    still = client(model, AdditiveNoise(noise_std=0.0, at="update"))
    zero = {name: torch.zeros_like(tensor) for name, tensor in parameters_of(model).items()}

    def noise(**changes: Any) -> torch.Tensor:
        rate = changes.pop("rate", 0.1)
        asked = Train(broadcast(model, **changes), rate)
        noisy, plain = (each.train_round(asked, None).trained.update.tensors for each in (who, still))
        return torch.cat([(noisy[name] - plain[name]).flatten() for name in plain])

    first = noise()
    assert torch.equal(first, noise())
    for other in (noise(params=zero), noise(rate=0.09)):
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 4 / math.sqrt(len(first))


def test_models_are_scored_once_a_round_and_only_where_agreed(model: nn.Module) -> None:
    unchanged(client(model), Evaluate(broadcast(model)), None, "validation examples, which was not agreed on")
    who = client(model, agreement=replace(AGREED, scores_on="validation"))
    reply, state = who.handle(Evaluate(broadcast(model, 1)), None)
    assert isinstance(reply, Evaluated)
    for _ in range(16):
        chosen = {name: torch.randn_like(tensor) for name, tensor in parameters_of(model).items()}
        unchanged(who, Evaluate(broadcast(model, 1, params=chosen)), state, "asked for the score of round 1 after")
    unchanged(who, Evaluate(broadcast(model, 2), "test"), state, "test examples, which was not agreed on")
    unchanged(who, Evaluate(broadcast(model, 4)), state, "asked for the score of round 4")
    assert isinstance(who.handle(Evaluate(broadcast(model, 3)), state)[0], Evaluated)


@dataclass(frozen=True)
class RefusesZeros(Guard):
    """A guard that lets no model of zeros pass."""

    def admit(self, broadcast: Broadcast, model: nn.Module, sight: Any, state: State, *, report: Any) -> State:
        if not any(bool(tensor.any()) for tensor in broadcast.params.values()):
            raise RefusedError("a model of zeros")
        return state

    def after(self, update: Any, broadcast: Broadcast, state: State) -> State:
        return state


def test_the_guard_looks_at_models_to_score_too(model: nn.Module) -> None:
    who = client(model, agreement=replace(AGREED, scores_on="validation"), guard=RefusesZeros())
    zero = {name: torch.zeros_like(tensor) for name, tensor in parameters_of(model).items()}
    unchanged(who, Evaluate(broadcast(model, 1, params=zero)), None, "a model of zeros")


def test_questions_are_those_that_were_agreed_on(model: nn.Module) -> None:
    who = client(model, Lrp(), aggregator=FedBoosting())
    unchanged(who, Ask(Question("weather", {}), "defense"), None, "asked 'weather', which was not agreed on")
    unchanged(who, Ask(Question("lrp_key", {}), "aggregator"), None, "asked 'lrp_key', which was not agreed on")
    _, state = who.handle(Ask(Question("lrp_key", {}), "defense"), None)
    unchanged(who, Ask(Question("lrp_key", {}), "defense"), state, "asked 'lrp_key' a second time")


def test_models_of_others_are_tried_once_a_round_and_no_more_than_there_are_clients(model: nn.Module) -> None:
    who = client(model, aggregator=FedBoosting())

    def asked(number: int, models: int) -> Ask:
        changes = {name: torch.zeros_like(tensor) for name, tensor in parameters_of(model).items()}
        candidates = {f"c{place}": {"changes": changes} for place in range(models)}
        sent: dict[str, Any] = {"params": parameters_of(model), "buffers": {}, "candidates": candidates}
        return Ask(Question(f"cross_validate/{number}", sent), "aggregator")

    unchanged(who, asked(0, 2), None, "another round than the one just trained in")
    _, state = who.handle(Train(broadcast(model), 0.1), None)
    unchanged(who, asked(1, 2), state, "another round than the one just trained in")
    unchanged(who, asked(0, 3), state, "asked to evaluate 3 models of 2 clients")
    reply, state = who.handle(asked(0, 2), state)
    assert isinstance(reply, Answered)
    unchanged(who, asked(0, 2), state, "asked 'cross_validate' a second time")


# --- budgets --------------------------------------------------------------------------------------------------------


def test_a_client_stops_when_its_own_budget_is_spent(model: nn.Module) -> None:
    pytest.importorskip("opacus")
    once, twice = (gaussian_epsilon(math.sqrt(rounds), 1e-5) for rounds in (1, 2))
    who = client(model, ClientDp(), agreement=replace(AGREED, consent=Consent(max_epsilon=(once + twice) / 2)))
    reply, state = who.handle(Train(broadcast(model, 0), 0.1), None)
    assert isinstance(reply, Trained)
    for number in (1, 2):
        unchanged(who, Train(broadcast(model, number), 0.1), state, "would spend epsilon 6.573 of a budget of 5.475")
    needs = client(model, AdditiveNoise(), agreement=replace(AGREED, consent=Consent(max_epsilon=1.0)))
    with pytest.raises(UsageError, match="needs a defense that counts epsilon, got AdditiveNoise"):
        needs.handle(Train(broadcast(model), 0.1), None)


def test_clipping_alone_spends_any_budget(model: nn.Module) -> None:
    pytest.importorskip("opacus")
    for defense in (ClientDp(noise_multiplier=0.0), DpSgd(noise_multiplier=0.0)):
        who = client(model, defense, agreement=replace(AGREED, consent=Consent(max_epsilon=1e9)))
        unchanged(who, Train(broadcast(model), 0.1), None, "would spend epsilon inf")


def test_a_client_stops_after_so_many_rounds(model: nn.Module) -> None:
    who = client(model, agreement=replace(AGREED, consent=Consent(max_rounds=1)))
    _, state = who.handle(Train(broadcast(model, 0), 0.1), None)
    unchanged(who, Train(broadcast(model, 1), 0.1), state, "1 rounds were answered already")


@pytest.mark.parametrize("settings", [{"max_epsilon": 0.0}, {"max_epsilon": math.inf}, {"max_rounds": 0}])
def test_limits_that_make_no_sense_are_refused(settings: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"expected {next(iter(settings))}"):
        Consent(**settings)


def test_the_rates_of_a_schedule_are_what_was_agreed_on() -> None:
    local = LocalTraining(learning_rate=0.1, schedule=Cosine())
    low, high = agreed_rates(local, 10)
    rates = [0.1 * local.schedule.factor(each, 10) for each in range(10)]
    assert (low, high) == pytest.approx((min(rates), max(rates)))


def server(defense: Defense, aggregator: Aggregator, **plan: Any) -> Server:
    trainer = Trainer(nn.Identity(), LocalTraining(batch_size=4, learning_rate=0.1), defense=defense)
    return Server(Setup(trainer, aggregator), {"a": 10, "b": 10}, FederationPlan(rounds=1, **plan), replayed(0))


PRIVATE = [DpSgd(), FedCdp(), ClientDp(), Stack(parts=(DpSgd(), AdditiveNoise()))]


@pytest.mark.parametrize("defense", PRIVATE, ids=lambda each: type(each).__name__)
def test_what_a_budget_does_not_count_is_refused_before_the_first_round(defense: Defense) -> None:
    for aggregator in (FedBoosting(), Encrypted(of=FedBoosting(), cipher=SMALL)):
        with pytest.raises(OutsideBudgetError, match=r"training_loss, cross_validate\) that the epsilon of"):
            server(defense, aggregator)
    with pytest.raises(OutsideBudgetError, match=r'set federation\.evaluate = "server"'):
        server(defense, FedAvg(), evaluate="clients")
    server(defense, FedAvg())
    server(defense, Encrypted(cipher=SMALL))


def test_without_a_promise_nothing_is_refused() -> None:
    for defense in (Defense(), AdditiveNoise(), DpSgd(noise_multiplier=0.0), FedKl()):
        server(defense, FedBoosting(), evaluate="clients")
    with pytest.raises(OutsideBudgetError, match="needs no private parts"):
        server(Stack(parts=(FedKl(), ClientDp())), FedAvg())


def test_a_question_goes_to_the_aggregator_or_to_the_defense(model: nn.Module) -> None:
    """Any other word would have been a fresh start of the count, or have written over another part of the state."""
    who = client(model, Lrp())
    for to in ("guard", "conduct", "params", "x1", "", None):
        asked = Ask(Question("lrp_sums", {"sums": [60]}), to)  # type: ignore[arg-type]
        unchanged(who, asked, None, "not a request of the protocol")
    unchanged(who, "train", None, "not a request of the protocol")  # type: ignore[arg-type]


def test_tensors_come_as_what_they_are(model: nn.Module) -> None:
    params = parameters_of(model)
    others = {name: tensor for name, tensor in params.items() if name != "0.weight"}
    moved = broadcast(model, params=others, buffers={"0.weight": params["0.weight"]})
    unchanged(client(model), Train(moved, 0.1), None, "other tensors than the agreed network's")
    named = replace(broadcast(model), model="x")  # type: ignore[arg-type]
    unchanged(client(model), Train(named, 0.1), None, "other tensors than the agreed network's")


@pytest.mark.parametrize("rate", [True, 10**400, None])
def test_a_rate_is_a_number(model: nn.Module, rate: Any) -> None:
    who = client(model, agreement=Agreement())
    unchanged(who, Train(broadcast(model), rate), None, "learning rate of")
