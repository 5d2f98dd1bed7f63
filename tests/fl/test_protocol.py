from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import RoundFailedError, UsageError
from leaktight.core.protocols import Aggregator, Asked, Conversation, Question
from leaktight.core.rng import Rng
from leaktight.core.training import Cosine, LocalTraining
from leaktight.core.types import Broadcast, Params, State, Update
from leaktight.fl.aggregators import FedAvg, FedSgd
from leaktight.fl.local import Trainer
from leaktight.fl.messages import Answered, Ask, Evaluate, Evaluated, Failed, Reply, Request, Train, Trained
from leaktight.fl.plan import FederationPlan, Server, Setup
from leaktight.fl.protocol import RoundOutcome, ServerState, draw_clients, federate, initial_state

PARAMS = {"w": torch.zeros(2), "b": torch.zeros(1)}


def make_server(local: LocalTraining | None = None, aggregator: Aggregator | None = None, **changes: Any) -> Server:
    local = local or LocalTraining(batch_size=4, learning_rate=0.1)
    base = Server(
        setup=Setup(Trainer(nn.Identity(), local), aggregator or FedAvg()),
        sizes={f"client-{number}": 10 + number for number in range(5)},
        plan=FederationPlan(rounds=2),
        rng=replayed(0),
    )
    return replace(base, **changes)


def good(client: str, request: Request) -> Reply:
    """An update of ones, a bit different in every round, so that it is no replay."""
    assert isinstance(request, Train)
    one = 1.0 + request.broadcast.round * 2**-21
    return Trained(Update({"w": one * torch.ones(2), "b": torch.ones(1)}, "delta", 10))


def play(
    server: Server, answer: Callable[[str, Request], Reply | None], state: ServerState | None = None
) -> tuple[ServerState, list[RoundOutcome]]:
    outcomes: list[RoundOutcome] = []
    conversation = federate(
        server,
        state or initial_state(server, PARAMS, {}),
        evaluate=lambda params, buffers: Evaluated(4, 2, 1.0),
        after_round=outcomes.append,
    )
    try:
        requests = next(conversation)
        while True:
            replies = {client: answer(client, request) for client, request in requests.items()}
            requests = conversation.send({client: reply for client, reply in replies.items() if reply})
    except StopIteration as end:
        return end.value, outcomes


def test_two_rounds_add_two_mean_changes() -> None:
    state, outcomes = play(make_server(), good)
    assert state.round == 2
    assert state.params["w"].tolist() == pytest.approx([2.0, 2.0])
    assert PARAMS["w"].tolist() == [0.0, 0.0]
    assert [outcome.score.accuracy for outcome in outcomes if outcome.score] == [0.5, 0.5]
    assert outcomes[0].bytes_up == 5 * 12
    assert outcomes[0].bytes_down == 5 * 12


def test_a_resumed_federation_plays_only_what_is_left() -> None:
    _, outcomes = play(make_server(), good)
    _, rest = play(make_server(), good, outcomes[0].state)
    assert [outcome.broadcast.round for outcome in rest] == [1]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (None, "no answer"),
        (Failed("out of memory"), "out of memory"),
        (Evaluated(1, 1, 0.0), "answered with Evaluated"),
        (Trained(Update({"w": torch.ones(3)}, "delta", 1)), r"'w': expected 2 of float32"),
        (Trained(Update({"w": torch.ones(2, dtype=torch.float64)}, "delta", 1)), "got 2 of float64"),
        (Trained(Update({"x": torch.ones(2)}, "delta", 1)), "unknown name 'x'"),
        (Trained(Update({"w": torch.tensor([1.0, float("inf")])}, "delta", 1)), "'w' is not finite"),
        (Trained(Update({"w": torch.ones(2)}, "gradient", 1)), "expected a delta, got a gradient"),
        (Trained(Update({}, "delta", 1)), "empty"),
        (Trained(Update({"w": torch.ones(2)}, "delta", None)), "no number of examples"),
        (Trained(Update({"w": torch.ones(2)}, "delta", 0)), "no number of examples"),
        (Trained(Update({"w": torch.ones(2)}, "delta", 1, buffers={"m": torch.ones(1)})), "unknown name 'm'"),
    ],
)
def test_a_bad_answer_is_left_out_or_fails_the_round(reply: Reply | None, reason: str) -> None:
    def answer(client: str, request: Request) -> Reply | None:
        return reply if client == "client-3" else good(client, request)

    with pytest.raises(RoundFailedError, match=reason):
        play(make_server(), answer)
    state, outcomes = play(make_server(plan=FederationPlan(rounds=1, min_clients=4)), answer)
    assert list(outcomes[0].failures) == ["client-3"]
    assert state.params["w"].tolist() == pytest.approx([1.0, 1.0])


def test_a_round_without_any_answer_is_a_failure() -> None:
    with pytest.raises(RoundFailedError, match=r"round 1: expected 1 updates, got 0 of 5"):
        play(make_server(plan=FederationPlan(rounds=1, min_clients=1)), lambda client, request: None)


def test_drawn_clients_are_sorted_reproducible_and_vary() -> None:
    server = make_server(plan=FederationPlan(rounds=9, per_round=2))
    draws = [draw_clients(server, number) for number in range(9)]
    assert all(draw == sorted(set(draw)) and len(draw) == 2 for draw in draws)
    assert draws == [draw_clients(server, number) for number in range(9)]
    assert len({tuple(draw) for draw in draws}) > 3


def test_the_schedule_reaches_the_clients() -> None:
    rates: list[float] = []

    def answer(client: str, request: Request) -> Reply:
        assert isinstance(request, Train)
        rates.append(request.learning_rate)
        return good(client, request)

    local = LocalTraining(batch_size=4, learning_rate=0.2, schedule=Cosine())
    play(make_server(local=local, plan=FederationPlan(rounds=2, per_round=1)), answer)
    assert rates == pytest.approx([0.2, 0.1])


def test_scheme_one_sends_each_client_its_loss_scale() -> None:
    scales: dict[str, float] = {}

    def answer(client: str, request: Request) -> Reply:
        assert isinstance(request, Train)
        scales[client] = request.loss_scale
        return Trained(Update({"w": torch.ones(2)}, "delta"))

    play(make_server(aggregator=FedAvg(scheme="I"), plan=FederationPlan(rounds=1)), answer)
    assert scales["client-4"] == pytest.approx(5 * 14 / 60)


def test_evaluation_by_clients_adds_up() -> None:
    def answer(client: str, request: Request) -> Reply:
        return Evaluated(10, 7, 3.0) if isinstance(request, Evaluate) else good(client, request)

    _, outcomes = play(make_server(plan=FederationPlan(rounds=1, evaluate="clients")), answer)
    assert outcomes[0].score == Evaluated(50, 35, 15.0)


def test_scores_come_when_asked_for_and_at_the_end() -> None:
    _, outcomes = play(make_server(plan=FederationPlan(rounds=5, evaluate_every=2)), good)
    assert [outcome.score is not None for outcome in outcomes] == [False, True, False, True, True]


@dataclass(frozen=True)
class Asking(FedAvg):
    """Asks every client for its secret and adds the sum of the answers."""

    @property
    def questions(self) -> Mapping[str, Asked]:
        return {"secret": Asked("for the sum", ("n",))}

    def aggregate(
        self, updates: Mapping[str, Update], state: State, *, broadcast: Broadcast, rng: Rng
    ) -> Conversation[tuple[Params, State]]:
        answers = yield {client: Question("secret", {"n": 1}) for client in updates}
        assert list(answers) == sorted(answers)
        return {"b": torch.tensor([sum(answer["n"] for answer in answers.values())])}, state


def test_an_aggregator_may_ask_the_clients() -> None:
    def answer(client: str, request: Request) -> Reply:
        if isinstance(request, Ask):
            assert request.to == "aggregator"
            return Answered({"n": 2.0})
        return good(client, request)

    state, _ = play(make_server(aggregator=Asking(), plan=FederationPlan(rounds=1)), answer)
    assert state.params["b"].tolist() == [10.0]


def test_a_question_without_answer_fails_the_round_by_name() -> None:
    def answer(client: str, request: Request) -> Reply | None:
        return (
            (None if client == "client-1" else Answered({"n": 1}))
            if isinstance(request, Ask)
            else good(client, request)
        )

    with pytest.raises(RoundFailedError, match="client-1 did not answer 'secret': no answer"):
        play(make_server(aggregator=Asking(), plan=FederationPlan(rounds=1)), answer)


@pytest.mark.parametrize("payload", [{}, {"n": 1, "more": 2}, {"other": 1}, ["n"]])
def test_an_answer_with_other_fields_fails_the_round_by_name(payload: Any) -> None:
    def answer(client: str, request: Request) -> Reply:
        if not isinstance(request, Ask):
            return good(client, request)
        return Answered(payload if client == "client-1" else {"n": 1})

    with pytest.raises(RoundFailedError, match="client-1 did not answer 'secret': the answer has other fields"):
        play(make_server(aggregator=Asking(), plan=FederationPlan(rounds=1)), answer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": FederationPlan(per_round=6)}, "per_round 6 > 5 clients"),
        ({"plan": FederationPlan(min_clients=6)}, "min_clients <= clients"),
        ({"local": LocalTraining(batch_size=11)}, "batch_size 11 > 10 of client-0"),
        ({"aggregator": FedSgd()}, "one local step"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_server(**changes)
