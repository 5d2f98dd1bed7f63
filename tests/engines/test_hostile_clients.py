"""Hostile clients among honest ones, in whole federations: what they reach through parameters and through buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.contracts.test_defenses import CASES
from tests.engines.conftest import MakeFederation
from tests.fl.talks import SMALL
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import RoundFailedError, UsageError
from leaktight.core.protocols import Aggregator, Defense
from leaktight.core.rng import global_seed
from leaktight.core.tensors import first_non_finite, squared_norm, weighted_mean
from leaktight.core.training import LocalTraining
from leaktight.core.types import Params, State, Update
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.graddefense import GradDefense
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.stack import Stack
from leaktight.engines import inprocess
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.local import evaluate
from leaktight.fl.messages import Outcome, Request, Trained
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome
from leaktight.fl.robust import Krum, Median, NormBound, Robust, TrimmedMean

CLIENTS, HOSTILE = 8, ("client-006", "client-007")
RULES: Mapping[str, Robust] = {
    "median": Median(),
    "trimmed_mean": TrimmedMean(trim=0.25),
    "krum": Krum(hostile=2),
    "multi-krum": Krum(hostile=2, keep=5),
    "norm_bound": NormBound(),
}
PLAN = FederationPlan(rounds=6, evaluate_every=6)
_TIMES = itertools.count()


def poisoned(federation: Federation, change: Callable[[Update], Update]) -> FederationState:
    """The state after all rounds, in which the hostile clients send a change of their updates."""
    exchange = inprocess.Carrier.exchange

    def tampered(self: inprocess.Carrier, requests: Mapping[str, Request]) -> dict[str, Outcome]:
        replies = exchange(self, requests)
        for name in HOSTILE:
            reply = replies.get(name)
            if isinstance(reply, Trained):
                replies[name] = replace(reply, update=change(reply.update))
        return replies

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inprocess.Carrier, "exchange", tampered)
        return inprocess.run(federation, workers=1, score=False)


def with_rule(make: MakeFederation, rule: Aggregator, **changes: Any) -> Federation:
    local = LocalTraining(epochs=2, batch_size=4, learning_rate=0.1, momentum=0.5)
    return make(**{"local": local, "aggregator": rule, "plan": PLAN, "clients": CLIENTS, "dropout": 0.0, **changes})


def plain_network() -> nn.Module:
    """Without batch normalisation."""
    with global_seed(replayed(0)):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def accuracy(federation: Federation, state: FederationState) -> float:
    score = evaluate(
        federation.trainer, state.server.params, state.server.buffers, federation.dataset.test.part(0, 300)
    )
    return score.accuracy


def flipped(update: Update) -> Update:
    return replace(update, tensors={name: -50 * tensor for name, tensor in update.tensors.items()})


def at_the_limit(update: Update) -> Update:
    """Near the largest value that is accepted, and never twice the same, which would be refused as a replay."""
    value = 1e6 - next(_TIMES)
    return replace(update, tensors={name: torch.full_like(tensor, value) for name, tensor in update.tensors.items()})


def poisonous_buffers(update: Update) -> Update:
    return replace(update, buffers={name: _poison(name, tensor) for name, tensor in (update.buffers or {}).items()})


def _poison(name: str, tensor: torch.Tensor) -> torch.Tensor:
    value = 2**62 if not tensor.is_floating_point() else 1e6 if "var" in name else -1e6
    return torch.full_like(tensor, value)


@dataclass(frozen=True)
class OwnRule(Aggregator):
    """An aggregator of a user's own, which takes of every tensor the update of the first client by name."""

    def combine(self, updates: Mapping[str, Update], state: State) -> tuple[Params, State]:
        return updates[min(updates)].tensors, state

    def combine_buffers(self, updates: Mapping[str, Update]) -> Params:
        return updates[min(updates)].buffers or {}


def test_an_aggregator_answers_for_buffers_too(make_federation: MakeFederation) -> None:
    """Before there was `combine_buffers` the mean of the buffers was taken whatever the aggregator."""
    federation = with_rule(make_federation, OwnRule())
    honest, attacked = (poisoned(federation, change) for change in (lambda update: update, poisonous_buffers))
    for name, tensor in honest.server.buffers.items():
        assert torch.equal(tensor, attacked.server.buffers[name]), name


def test_the_mean_falls_to_each_of_them(make_federation: MakeFederation) -> None:
    """The control: without a rule the same clients do break the model."""
    federation = with_rule(make_federation, FedAvg())
    assert accuracy(federation, poisoned(federation, lambda update: update)) > 0.9
    for change in (flipped, at_the_limit, poisonous_buffers):
        try:
            score = accuracy(federation, poisoned(federation, change))
        except RoundFailedError:  # on such a model honest updates are out of range
            score = 0.0
        assert score < 0.6, change.__name__


@pytest.mark.parametrize("change", [flipped, at_the_limit, poisonous_buffers], ids=lambda change: change.__name__)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_holds_against_them(make_federation: MakeFederation, rule: str, change: Callable[..., Update]) -> None:
    federation = with_rule(make_federation, RULES[rule])
    assert accuracy(federation, poisoned(federation, change)) > 0.85


# Defenses beside the rules.

REFUSED: Mapping[str, Defense] = {
    "client_dp with noise_shares": ClientDp(noise_shares=8),
    "graddefense with compensation_scale": GradDefense(compensation_scale=0.1),
    "a stack with one of them": Stack(parts=(AdditiveNoise(), GradDefense(compensation_scale=0.1))),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("defense", REFUSED)
def test_a_defense_that_needs_a_mean_refuses_by_name(make_federation: MakeFederation, defense: str, rule: str) -> None:
    names = f"{type(REFUSED[defense]).__name__} cannot be combined with {type(RULES[rule]).__name__}: "
    with pytest.raises(UsageError, match=names):
        with_rule(make_federation, RULES[rule], defense=REFUSED[defense])
    with_rule(make_federation, FedAvg(scheme="I"), defense=REFUSED[defense])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", CASES)
def test_every_other_defense_works_beside_every_rule(make_federation: MakeFederation, kind: str, rule: str) -> None:
    """One round changes the model, and nothing is broken; what it costs is in docs/results/robust.md."""
    local = LocalTraining(steps=1, batch_size=4, learning_rate=0.1)
    federation = with_rule(make_federation, RULES[rule], local=local, plan=FederationPlan(rounds=1))
    if kind in ("dp_sgd", "fed_cdp", "client_dp"):  # they refuse batch normalisation
        federation = federation.with_trainer(model=plain_network())
    federation = federation.with_defense(CASES[kind].defense)
    after = inprocess.run(federation, workers=1, score=False)
    assert first_non_finite(after.server.params) is None
    before = federation.first_state().server.params
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.server.params.items())


def test_honest_clients_can_clip_under_encryption(make_federation: MakeFederation) -> None:
    clipping = ClientDp(noise_multiplier=0.0, clip_norm=0.01)
    federation = with_rule(make_federation, Encrypted(cipher=SMALL), plan=FederationPlan(rounds=1))
    federation = federation.with_trainer(model=plain_network()).with_defense(clipping)
    after, before = (
        inprocess.run(federation, workers=1, score=False).server.params,
        federation.first_state().server.params,
    )
    norm = float(squared_norm(after[name] - tensor for name, tensor in before.items())) ** 0.5
    assert 0 < norm <= 0.01


# Numbers of clients, before the first round.


@pytest.mark.parametrize(
    ("rule", "plan", "message"),
    [
        (Krum(hostile=3), FederationPlan(), r"2 \* 3 \+ 3 = 9 clients in a round, got 8.*clients per round = 8"),
        (Krum(hostile=1), FederationPlan(per_round=4), "= 5 clients in a round, got 4"),
        (Krum(hostile=1), FederationPlan(per_round=6, min_clients=3), r"got 3.*min_clients = 3"),
        (TrimmedMean(trim=0.1), FederationPlan(), "at least 10 clients in a round, got 8"),
        (Median(), FederationPlan(per_round=2), "at least 3 clients in a round, got 2"),
    ],
    ids=str,
)
def test_too_few_clients_are_refused_before_the_first_round(
    make_federation: MakeFederation, rule: Robust, plan: FederationPlan, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        with_rule(make_federation, rule, plan=plan)


@pytest.mark.parametrize("rule", RULES)
def test_an_audit_may_ask_a_client_alone(make_federation: MakeFederation, rule: str) -> None:
    federation = replace(with_rule(make_federation, RULES[rule], plan=FederationPlan(rounds=1)), drawn=HOSTILE[:1])
    outcomes: list[RoundOutcome] = []
    inprocess.run(federation, workers=1, score=False, after_round=lambda outcome, _: outcomes.append(outcome))
    (sent,) = outcomes[0].updates.values()
    assert all(torch.equal(outcomes[0].change[name], tensor) for name, tensor in sent.tensors.items())


def test_one_client_alone_has_nobody_to_fear(make_federation: MakeFederation) -> None:
    """As in the reference with all data at one place (`--centralised`)."""
    with_rule(make_federation, Krum(hostile=3), clients=1)


def test_the_mean_of_buffers_is_what_it_was() -> None:
    sent = {
        "a": Update({}, "delta", 1, {"m": torch.tensor([1.0])}),
        "b": Update({}, "delta", 3, {"m": torch.tensor([5.0])}),
        "c": Update({}, "delta", 9),
    }
    expected = weighted_mean({name: sent[name].buffers or {} for name in "ab"}, {"a": 1.0, "b": 3.0})
    assert float(expected["m"]) == 4.0
    assert torch.equal(FedAvg().combine_buffers(sent)["m"], expected["m"])
