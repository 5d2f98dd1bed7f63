"""One client among many that sends something odd: it loses its own update, and no other loses one for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fl.talks import SMALL
from tests.fl.test_encrypted import driven, make_federation
from tests.fl.test_protocol import good, make_server, play
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import RoundFailedError, UntrustedError
from leaktight.core.protocols import Aggregator
from leaktight.core.rng import global_seed
from leaktight.core.types import Update
from leaktight.defenses.client_dp import ClientDp
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.fedboosting import FedBoosting
from leaktight.fl.limits import Limits
from leaktight.fl.messages import Answered, Ask, Declined, Failed, Reply, Request, Train, Trained, decode, encode
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome, carry, federate, initial_state

LIAR = "client-3"


def outcome_of(update: Callable[[Update], Update], **plan: Any) -> RoundOutcome:
    """A round in which one of five clients sends a change of an honest update."""

    def answer(client: str, request: Request) -> Reply:
        reply = good(client, request)
        return Trained(update(reply.update)) if client == LIAR and isinstance(reply, Trained) else reply

    settings = FederationPlan(rounds=1, min_clients=4, **plan)
    return play(make_server(plan=settings), answer)[1][0]


@pytest.mark.parametrize("sealed", [Declined(), "text", 7, [torch.ones(2)], [], False, "", {}])
def test_a_plain_update_has_no_encrypted_part(sealed: Any) -> None:
    outcome = outcome_of(lambda update: replace(update, sealed=sealed))
    assert outcome.failures == {LIAR: "expected a plain update, got another"}


def test_a_word_in_place_of_ciphertexts_is_no_way_around_the_norm_limit() -> None:
    def long(update: Update) -> Update:
        tensors = {name: 1e5 * tensor for name, tensor in update.tensors.items()}
        return replace(update, tensors=tensors, sealed="x")  # type: ignore[arg-type]

    assert list(outcome_of(long, norm_limit=3.0).failures) == [LIAR]


def test_a_number_of_examples_that_nobody_needs_buys_no_weight() -> None:
    """With equal weights honest clients send none, and the mean of batch statistics would weigh by it."""
    known = {"mean": torch.zeros(2)}
    server = make_server(aggregator=FedAvg(scheme="I"), plan=FederationPlan(rounds=1, min_clients=4))

    def exchange(requests: Mapping[str, Request]) -> dict[str, Reply]:
        return {client: Trained(_with_statistics(client)) for client in requests}

    state = initial_state(server, {"w": torch.zeros(2)}, known)
    outcomes: list[RoundOutcome] = []
    carry(federate(server, state, evaluate=None, after_round=outcomes.append), exchange)
    assert "number of examples" in outcomes[0].failures[LIAR]
    assert outcomes[0].state.buffers["mean"].tolist() == [1.0, 1.0]


def _with_statistics(client: str) -> Update:
    lies = client == LIAR
    return Update(
        {"w": torch.ones(2)}, "delta", 10 if lies else None, buffers={"mean": torch.full((2,), 100.0 if lies else 1.0)}
    )


def test_one_tensor_in_many_places_is_refused_when_it_is_read() -> None:
    """The bytes of a message bound the work with it only if each tensor is there once."""
    shared = torch.ones(3)
    honest = encode({"reply": Answered({"a": shared, "b": 2 * shared})})
    assert isinstance(decode(honest, Limits())["reply"], Answered)
    start = honest.index(b'{"__tensor__": "message/reply/payload/b"')
    twice = bytearray(honest)
    twice[start + len(b'{"__tensor__": "message/reply/payload/')] = ord("a")
    with pytest.raises(UntrustedError, match="each tensor once"):
        decode(bytes(twice), Limits())


Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]

CIPHERTEXTS: Mapping[str, Change] = {
    "truncated": lambda sealed: {**sealed, "body": sealed["body"][:-1]},
    "zeros": lambda sealed: {**sealed, "body": torch.zeros_like(sealed["body"])},
    "another key": lambda sealed: {**sealed, "key": "0" * 32},
    "another form": lambda sealed: {**sealed, "form": "other"},
    "fewer names": lambda sealed: {**sealed, "names": sealed["names"][:1]},
    "no names": lambda sealed: {**sealed, "names": []},
    "lists as names": lambda sealed: {**sealed, "names": [[1], {}]},
    "another count": lambda sealed: {**sealed, "count": 3},
    "nothing": lambda sealed: {},
    "a message": lambda sealed: {**sealed, "more": Declined()},
    "float8": lambda sealed: {**sealed, "more": torch.ones(2).to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("of", [FedAvg(), FedBoosting()], ids=["fedavg", "fedboosting"])
@pytest.mark.parametrize("liar", ["client-000", "client-001"])
@pytest.mark.parametrize("damage", CIPHERTEXTS)
def test_a_bad_ciphertext_loses_its_own_client_only(damage: str, liar: str, of: Any) -> None:
    def tamper(client: str, request: Request, reply: Reply) -> Reply:
        if client != liar or not isinstance(reply, Trained):
            return reply
        return Trained(replace(reply.update, sealed=CIPHERTEXTS[damage](reply.update.sealed or {})))

    assert failures_of(Encrypted(of=of, cipher=SMALL), tamper) == [[liar]]


def failures_of(aggregator: Aggregator, tamper: Any) -> list[list[str]]:
    outcomes: list[RoundOutcome] = []
    driven(make_federation(aggregator, min_clients=2), tamper, outcomes.append)
    return [list(outcome.failures) for outcome in outcomes[:1]]


@pytest.mark.parametrize("metrics", [{}, {"training_loss": -1.0}, {"training_loss": 1e299}, {"training_loss": True}])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_bad_training_loss_loses_its_own_client_only(metrics: dict[str, float], sealed: bool) -> None:
    def tamper(client: str, request: Request, reply: Reply) -> Reply:
        lies = client == "client-001" and isinstance(reply, Trained)
        return Trained(replace(reply.update, metrics=metrics)) if lies else reply  # type: ignore[union-attr]

    aggregator: Aggregator = Encrypted(of=FedBoosting(), cipher=SMALL) if sealed else FedBoosting()
    assert failures_of(aggregator, tamper) == [["client-001"]]


def test_fewer_than_needed_still_fail_the_round_by_name() -> None:
    def tamper(client: str, request: Request, reply: Reply) -> Reply:
        lies = client == "client-001" and isinstance(reply, Trained)
        return Trained(replace(reply.update, metrics={})) if lies else reply  # type: ignore[union-attr]

    with pytest.raises(RoundFailedError, match=r"expected 3 updates, got 2 of 3 .client-001: .*training_loss"):
        driven(make_federation(FedBoosting()), tamper)


@pytest.mark.parametrize("value", [1.7e308, 1e200])
@pytest.mark.parametrize("variant", ["code", "paper"])
def test_losses_beyond_all_bounds_are_named(value: float, variant: Any) -> None:
    """Their sum overflows, and with it the weights of everybody."""

    def tamper(client: str, request: Request, reply: Reply) -> Reply:
        if client == "client-000" or not isinstance(reply, Answered):
            return reply
        return Answered({"losses": dict.fromkeys(reply.payload["losses"], value)})

    with pytest.raises(RoundFailedError, match="client-001 reports a loss of"):
        driven(make_federation(FedBoosting(variant=variant)), tamper)


def test_a_model_that_overflows_is_reported_as_bad_by_those_who_judge_it() -> None:
    """Otherwise the round fails, and an honest judge is named for it."""

    def tamper(client: str, request: Request, reply: Reply) -> Reply:
        if client != "client-001" or not isinstance(reply, Trained) or not isinstance(request, Train):
            return reply
        huge = {name: torch.full_like(each, 1e6) for name, each in request.broadcast.params.items()}
        return Trained(replace(reply.update, tensors=huge))

    outcomes: list[RoundOutcome] = []
    with global_seed(replayed(1)):
        deep = nn.Sequential(nn.Flatten(), *(nn.Linear(4, 4) for _ in range(7)), nn.Linear(4, 3))
    driven(make_federation(FedBoosting(), deep, rounds=1), tamper, outcomes.append)
    assert not outcomes[0].failures


@pytest.mark.parametrize("key", [7, None, "text", b"", {}, [b"x"], torch.ones(32, dtype=torch.uint8)], ids=repr)
@pytest.mark.parametrize(("kind", "liar"), [("he_publish", "client-001"), ("he_make_keys", "client-000")])
def test_who_sends_no_key_is_named_and_nobody_else(kind: str, liar: str, key: Any) -> None:
    """Not the client to whom it would be relayed."""

    def tamper(client: str, request: Request, reply: Reply) -> Reply:
        lies = client == liar and isinstance(request, Ask) and request.question.kind == kind
        return Answered({**reply.payload, "public": key}) if lies and isinstance(reply, Answered) else reply

    with pytest.raises(RoundFailedError, match=f"{liar} sent no public key"):
        driven(make_federation(Encrypted(cipher=SMALL)), tamper)


@pytest.mark.parametrize("answer", [{}, {"boxes": None}, {"boxes": {}}, {"public": 7}, {"public": b"no key"}])
def test_keys_that_are_none_are_named(answer: dict[str, Any]) -> None:
    def tamper(client: str, request: Request, reply: Reply) -> Reply:
        makes = isinstance(request, Ask) and request.question.kind == "he_make_keys" and isinstance(reply, Answered)
        return Answered({"public": b"", "boxes": {}, **answer}) if makes else reply

    with pytest.raises(RoundFailedError, match="client-00"):
        driven(make_federation(Encrypted(cipher=SMALL)), tamper)


def test_buffers_are_refused_where_clients_promise_to_send_none() -> None:
    """Beside a private defense the honest send none: the only sender would set them alone."""
    server = make_server(plan=FederationPlan(rounds=1, min_clients=4))
    server = replace(server, setup=server.setup.with_defense(ClientDp(noise_multiplier=1.0), rng=server.rng))

    def exchange(requests: Mapping[str, Request]) -> dict[str, Reply | Failed]:
        return {
            client: Trained(
                Update({"w": torch.ones(2)}, "delta", 10, buffers={"mean": torch.ones(2)} if client == LIAR else None)
            )
            for client in requests
        }

    outcomes: list[RoundOutcome] = []
    state = initial_state(server, {"w": torch.zeros(2)}, {"mean": torch.zeros(2)})
    carry(federate(server, state, evaluate=None, after_round=outcomes.append), exchange)
    assert list(outcomes[0].failures) == [LIAR]
    assert outcomes[0].state.buffers["mean"].tolist() == [0.0, 0.0]
