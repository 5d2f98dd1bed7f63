"""What a server makes of one client among many that lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fl.talks import SMALL

from leaktight.core.errors import LeaktightError, RoundFailedError, UsageError
from leaktight.core.tensors import digest
from leaktight.core.types import Update
from leaktight.engines import inprocess
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.fedboosting import FedBoosting
from leaktight.fl.federation import Federation
from leaktight.fl.messages import Evaluated, Failed, Outcome, Request, Trained
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome, ServerState

MakeFederation = Callable[..., Federation]
Tamper = Callable[[int, Mapping[str, Outcome]], Mapping[str, Outcome]]
LIAR = "client-001"


def played(federation: Federation, tamper: Tamper, until: int | None = None) -> tuple[list[RoundOutcome], ServerState]:
    """Run a federation whose replies are changed on their way: tamper(turn, replies)."""
    outcomes: list[RoundOutcome] = []
    turn = 0
    exchange = inprocess.Carrier.exchange

    def tapped(self: inprocess.Carrier, requests: Mapping[str, Request]) -> Any:
        nonlocal turn
        turn += 1
        return tamper(turn - 1, exchange(self, requests))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inprocess.Carrier, "exchange", tapped)
        final = inprocess.run(federation, workers=1, after_round=lambda outcome, _: outcomes.append(outcome))
    return outcomes, final.server


def lying(change: Callable[[Update], Update]) -> Tamper:
    def tamper(turn: int, replies: Mapping[str, Outcome]) -> Mapping[str, Outcome]:
        reply = replies[LIAR]
        assert isinstance(reply, Trained)
        return {**replies, LIAR: Trained(change(reply.update))}

    return tamper


def scaled(factor: float) -> Callable[[Update], Update]:
    return lambda update: replace(update, tensors={name: factor * each for name, each in update.tensors.items()})


@pytest.mark.parametrize("whose", [LIAR, "client-000"], ids=["its own", "another's"])
def test_an_update_of_an_earlier_round_is_refused(make_federation: MakeFederation, whose: str) -> None:
    federation = make_federation(plan=FederationPlan(rounds=3, min_clients=4))
    first: dict[str, Outcome] = {}

    def replayed(turn: int, replies: Mapping[str, Outcome]) -> Mapping[str, Outcome]:
        first.setdefault("update", replies[whose])
        return replies if turn == 0 else {**replies, LIAR: first["update"]}

    outcomes, _ = played(federation, replayed)
    assert [list(outcome.failures) for outcome in outcomes] == [[], [LIAR], [LIAR]]
    assert "of an earlier round" in outcomes[1].failures[LIAR]


def test_an_update_that_changes_nothing_may_come_again(make_federation: MakeFederation) -> None:
    outcomes, _ = played(make_federation(plan=FederationPlan(rounds=3)), lying(scaled(0.0)))
    assert [outcome.failures for outcome in outcomes] == [{}, {}, {}]


def test_a_scaled_update_is_flagged_and_refused_where_there_is_a_limit(make_federation: MakeFederation) -> None:
    federation = make_federation(plan=FederationPlan(rounds=2, min_clients=4))
    outcomes, _ = played(federation, lying(scaled(-50.0)))
    assert [list(outcome.flags) for outcome in outcomes] == [[LIAR], [LIAR]]
    assert "times the median" in outcomes[0].flags[LIAR]
    limited = replace(federation, plan=replace(federation.plan, norm_limit=10.0))
    outcomes, server = played(limited, lying(scaled(-50.0)))
    assert [list(outcome.failures) for outcome in outcomes] == [[LIAR], [LIAR]]
    assert "times the median" in outcomes[0].failures[LIAR]

    def absent(turn: int, replies: Mapping[str, Outcome]) -> Mapping[str, Outcome]:
        return {**replies, LIAR: Failed("no answer")}

    assert digest(server.params) == digest(played(limited, absent)[1].params)
    honest, _ = played(limited, lambda turn, replies: replies)
    assert [(outcome.failures, outcome.flags) for outcome in honest] == [({}, {})] * 2


def test_norms_of_encrypted_updates_cannot_be_limited(make_federation: MakeFederation) -> None:
    with pytest.raises(UsageError, match="norm_limit compares the norms"):
        make_federation(
            plan=FederationPlan(rounds=1, norm_limit=5.0),
            aggregator=Encrypted(cipher=SMALL),
        )
    with pytest.raises(ValueError, match="expected norm_limit > 1"):
        FederationPlan(norm_limit=1.0)


FORGED = "delta\x1b[2J\n2026-11-17 INFO all is well" + 1000 * "x"


@pytest.mark.parametrize(
    "change",
    [
        lambda update: replace(update, kind=FORGED),
        lambda update: replace(update, metrics={FORGED: 1.0}),
        lambda update: replace(update, metrics={f"figure {number}": 1.0 for number in range(10_000)}),
        lambda update: replace(update, metrics={"training_loss": 10**400}),
        lambda update: replace(update, tensors={FORGED: torch.zeros(1)}),
        lambda update: replace(update, tensors=torch.zeros(2)),
        lambda update: replace(update, tensors={**update.tensors, FORGED: FORGED}),
        lambda update: replace(update, num_examples=FORGED),
    ],
)
@pytest.mark.parametrize("aggregator", [None, FedBoosting()], ids=["fedavg", "fedboosting"])
def test_texts_and_figures_of_a_client_do_no_harm(
    make_federation: MakeFederation, change: Callable[[Update], Update], aggregator: FedBoosting | None
) -> None:
    given = {} if aggregator is None else {"aggregator": aggregator}
    federation = make_federation(plan=FederationPlan(rounds=1, min_clients=4), **given)

    def first(turn: int, replies: Mapping[str, Outcome]) -> Mapping[str, Outcome]:
        return lying(change)(turn, replies) if turn == 0 else replies

    outcomes, _ = played(federation, first)
    (reason,) = outcomes[0].failures.values()
    assert reason.isprintable()
    assert len(reason) <= 300


def test_the_text_of_a_failure_is_one_short_line(make_federation: MakeFederation) -> None:
    """Also of a client in this process, whose error may quote what it read."""
    federation = make_federation(plan=FederationPlan(rounds=1, min_clients=4))
    outcomes, _ = played(federation, lambda turn, replies: {**replies, LIAR: Failed(FORGED * 1000)})
    assert outcomes[0].failures[LIAR].isprintable()
    assert len(outcomes[0].failures[LIAR]) <= 300
    with pytest.raises(RoundFailedError) as caught:
        played(make_federation(plan=FederationPlan(rounds=1)), lambda turn, replies: {**replies, LIAR: Failed(FORGED)})
    assert str(caught.value).isprintable()
    assert issubclass(RoundFailedError, LeaktightError)


@pytest.mark.parametrize(
    "score", [Evaluated(10**400, 10**400, 0.0), Evaluated(10, 5, 10**400), Evaluated(10**15, 10**15, 0.0)]
)
def test_a_score_that_no_client_can_have_is_left_out(make_federation: MakeFederation, score: Evaluated) -> None:
    federation = make_federation(plan=FederationPlan(rounds=1, evaluate="clients"))

    def lied(turn: int, replies: Mapping[str, Outcome]) -> Mapping[str, Outcome]:
        return {**replies, LIAR: score} if turn == 1 else replies

    outcomes, _ = played(federation, lied)
    assert outcomes[0].score is not None
    assert 0 <= outcomes[0].score.accuracy <= 1
    assert outcomes[0].score.num_examples < 1000
