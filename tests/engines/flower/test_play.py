from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.flower.grids import Change, LocalGrid, nodes

from leaktight.core.errors import LeaktightError, RoundFailedError
from leaktight.core.protocols import Aggregator, Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import digest
from leaktight.core.types import Params, State, Update
from leaktight.defenses.ada_lrp import AdaLrp
from leaktight.defenses.adadefense import AdaDefense
from leaktight.defenses.fedkl import FedKl
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.outpost import Outpost
from leaktight.engines import inprocess
from leaktight.engines.flower.carrier import GridCarrier
from leaktight.engines.flower.identity import new_identity
from leaktight.engines.flower.messages import read_reply, reply_message
from leaktight.engines.flower.node import NodeSettings, client_app
from leaktight.engines.flower.server import play
from leaktight.fl.aggregators import FedAvg, ServerAdam, ServerMomentum
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.messages import Declined, Failed, Trained
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome
from leaktight.fl.robust import Krum, Median, NormBound, TrimmedMean

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict  # isort: skip

MakeFederation = Callable[..., Federation]
IDENTITY = new_identity()


def whole(state: FederationState) -> str:
    return digest({**state.server.params, **state.server.buffers})


def grid_for(
    federation: Federation,
    *,
    state_dir: Path | None = None,
    reproducible: bool = True,
    change: Change = lambda sent, reply: reply,
) -> LocalGrid:
    app = client_app(lambda message, context: NodeSettings(federation, state_dir, reproducible, IDENTITY))
    return LocalGrid(app, nodes(len(federation.shares)), change)


def with_update(change: Callable[[Update], Update], node: int) -> Change:
    """A node that sends something else than it should, and signs it."""

    def changed(sent: Message, reply: Message) -> Message:
        if sent.metadata.message_type != "train" or sent.metadata.dst_node_id != node:
            return reply
        trained = read_reply(reply)
        assert isinstance(trained, Trained)
        name = f"client-{(1000 - node) // 7:03d}"
        return reply_message(replace(trained, update=change(trained.update)), sent, name, IDENTITY)

    return changed


@pytest.mark.parametrize(
    "defense",
    [Defense(), Outpost(), AdaDefense(), Lrp(), AdaLrp(), FedKl(key_length=8), AdditiveNoise()],
    ids=lambda defense: type(defense).__name__,
)
def test_the_model_is_that_of_the_other_engine(make_federation: MakeFederation, defense: Defense) -> None:
    federation = make_federation(
        defense=defense, clients=3, plan=FederationPlan(rounds=2), aggregator=FedAvg(scheme="I")
    )
    scores: dict[str, list[object]] = {"inprocess": [], "flower": []}
    one = inprocess.run(federation, workers=1, after_round=lambda outcome, _: scores["inprocess"].append(outcome.score))
    two = play(
        grid_for(federation),
        federation,
        run="a",
        after_round=lambda outcome, _: scores["flower"].append(outcome.score),
    )
    assert whole(one) == whole(two)
    assert scores["inprocess"] == scores["flower"]
    assert two.clients == {}


@pytest.mark.parametrize(
    "aggregator",
    [
        Median(),
        TrimmedMean(of=ServerMomentum()),
        Krum(),
        Krum(keep=3),
        NormBound(),
        NormBound(bound=0.1, of=ServerAdam()),
    ],
    ids=str,
)
def test_robust_rules_give_the_same_model_on_both_engines(
    make_federation: MakeFederation, aggregator: Aggregator
) -> None:
    federation = make_federation(clients=5, plan=FederationPlan(rounds=2), aggregator=aggregator)
    assert whole(inprocess.run(federation, workers=1)) == whole(play(grid_for(federation), federation, run="a"))


def test_without_the_seed_of_the_config_noise_is_the_nodes_own(make_federation: MakeFederation) -> None:
    federation = make_federation(defense=AdditiveNoise(noise_std=0.1), plan=FederationPlan(rounds=1))
    results = {whole(play(grid_for(federation, reproducible=False), federation, run="a")) for _ in range(2)}
    results.add(whole(inprocess.run(federation, workers=1)))
    assert len(results) == 3


def spoiled(**changes: Any) -> Callable[[Update], Update]:
    return lambda update: replace(update, **changes)


def first_tensor(update: Update, change: Callable[[torch.Tensor], Any]) -> Update:
    name = next(iter(update.tensors))
    return replace(update, tensors={**update.tensors, name: change(update.tensors[name])})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda update: replace(update, tensors={"strange": torch.zeros(1)}), "unknown name 'strange'"),
        (lambda update: first_tensor(update, lambda tensor: tensor[:1]), "expected 4 x 3 x 3 x 3"),
        (lambda update: first_tensor(update, lambda tensor: tensor.double()), "of float64"),
        (lambda update: first_tensor(update, lambda tensor: tensor * float("nan")), "not finite"),
        (lambda update: first_tensor(update, lambda tensor: tensor + 1e30), "has a value of 1e+30"),
        (lambda update: first_tensor(update, lambda tensor: "tensor"), "expected a tensor, got str"),
        (spoiled(tensors=[1, 2]), "expected tensors by name"),
        (spoiled(tensors={}), "empty"),
        (spoiled(num_examples=10**9), "expected at most 19 examples"),
        (spoiled(num_examples=-1), "expected at most 19 examples"),
        (spoiled(metrics={"loss": "low"}), "metrics"),
        (spoiled(kind="gradient"), "expected a delta"),
    ],
)
def test_a_malformed_update_is_left_out(
    make_federation: MakeFederation, change: Callable[[Update], Update], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The round is as if the client had not answered at all."""
    plan = FederationPlan(rounds=1, min_clients=4)
    federation = make_federation(plan=plan)
    outcomes: list[RoundOutcome] = []
    bad = grid_for(federation, change=with_update(change, 1000 - 7 * 2))
    final = play(bad, federation, run="a", after_round=lambda outcome, _: outcomes.append(outcome))
    assert reason in outcomes[0].failures["client-002"]
    silent = grid_for(
        federation,
        change=lambda sent, reply: (
            None if sent.metadata.message_type == "train" and sent.metadata.dst_node_id == 1000 - 7 * 2 else reply
        ),
    )
    assert whole(final) == whole(play(silent, federation, run="a"))
    with pytest.raises(RoundFailedError, match="expected 5 updates, got 4"):
        play(bad, replace(federation, plan=FederationPlan(rounds=1)), run="b")


def foreign(data: bytes) -> RecordDict:
    array = Array(np.frombuffer(data, dtype=np.uint8))
    return RecordDict({"leaktight.reply": ArrayRecord({"bytes": array})})


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"leaktight.reply": ConfigRecord({"reply": b"x"})}),
        foreign(b"\x00" * 50),
        foreign(b""),
    ],
    ids=["empty", "other record", "noise", "no bytes"],
)
def test_an_answer_that_is_no_message_is_a_failure(make_federation: MakeFederation, content: RecordDict) -> None:
    federation = make_federation(plan=FederationPlan(rounds=1, min_clients=4))
    outcomes: list[RoundOutcome] = []

    def garbled(sent: Message, reply: Message) -> Message:
        wrong = sent.metadata.message_type == "train" and sent.metadata.dst_node_id == 1000
        return Message(content, reply_to=sent) if wrong else reply

    play(grid_for(federation, change=garbled), federation, run="a", after_round=lambda each, _: outcomes.append(each))
    assert outcomes[0].failures.keys() == {"client-000"}
    assert outcomes[0].failures["client-000"].startswith("the answer ")


SECRET = "patient 4711"


@dataclass(frozen=True)
class Raises(Defense):
    """Fails at one client, or at all of them, with a text that must not be seen."""

    everywhere: bool = False

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        if self.everywhere or rng.path[rng.path.index("client") + 1] == "client-001":
            raise ZeroDivisionError(SECRET) if self.everywhere else LeaktightError(SECRET)
        return step.gradient, state


def test_texts_of_errors_stay_with_the_client(
    make_federation: MakeFederation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = make_federation(defense=Raises(), plan=FederationPlan(rounds=1, min_clients=4))
    outcomes: list[RoundOutcome] = []
    replies: list[Message] = []

    def spied(sent: Message, reply: Message) -> Message:
        replies.append(reply)
        return reply

    grid = grid_for(federation, state_dir=tmp_path, change=spied)
    with caplog.at_level(logging.CRITICAL, logger="leaktight.flower"):
        play(grid, federation, run="a", after_round=lambda outcome, _: outcomes.append(outcome))
    assert outcomes[0].failures == {"client-001": "the client declined; its own log says why"}
    for reply in replies:
        for record in reply.content.array_records.values():
            assert SECRET.encode() not in record["bytes"].data
    assert SECRET in (tmp_path / "client-001.log").read_text()
    assert (tmp_path / "client-001.log").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "client-000.log").exists()


def test_a_run_in_which_everybody_fails_is_a_failure(make_federation: MakeFederation) -> None:
    federation = make_federation(defense=Raises(everywhere=True), plan=FederationPlan(rounds=1, min_clients=1))
    with pytest.raises(RoundFailedError, match="expected 1 updates, got 0 of 5") as caught:
        play(grid_for(federation), federation, run="a")
    assert SECRET not in str(caught.value)


def test_an_error_of_flowers_own_is_told_in_our_words(make_federation: MakeFederation) -> None:
    """A node without a place cannot say who it is; a dead node's error comes from a wrong sender."""
    federation = make_federation(plan=FederationPlan(rounds=1, min_clients=4))
    outcomes: list[RoundOutcome] = []

    def dead(sent: Message, reply: Message) -> Message:
        if sent.metadata.message_type == "train" and sent.metadata.dst_node_id == 1000:
            from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message

            return create_message_error_unavailable_res_message(sent.metadata, "node_unavail")
        return reply

    play(grid_for(federation, change=dead), federation, run="a", after_round=lambda each, _: outcomes.append(each))
    assert outcomes[0].failures == {"client-000": "the node is gone"}


def test_two_nodes_of_one_name_and_unknown_nodes_are_ignored(
    make_federation: MakeFederation, caplog: pytest.LogCaptureFixture
) -> None:
    federation = make_federation(plan=FederationPlan(rounds=1, min_clients=3))
    app = client_app(lambda message, context: NodeSettings(federation, None, True))
    grid = LocalGrid(app, {**nodes(4), 5: {"client": "client-001"}, 6: {"client": "nobody"}})
    carrier = GridCarrier(grid, sorted(federation.shares), "a")
    carrier.gather(0.0)
    assert sorted(carrier.nodes) == ["client-000", "client-002", "client-003"]
    assert "another node has the same name" in caplog.text
    final = []
    play(grid, federation, run="a", join_seconds=0.0, after_round=lambda outcome, _: final.append(outcome))
    assert final[0].failures == {"client-001": "it has no node", "client-004": "it has no node"}
    with pytest.raises(LeaktightError, match="expected nodes of 5 clients, got none"):
        play(LocalGrid(app, {}), federation, run="a", join_seconds=0.0)


class Stop(Exception):
    pass


@pytest.mark.parametrize("defense", [AdaDefense(), AdaLrp(), FedKl(key_length=8)], ids=lambda each: type(each).__name__)
def test_a_server_that_stops_in_a_round_goes_on_to_the_same_model(
    make_federation: MakeFederation, tmp_path: Path, defense: Defense
) -> None:
    """Some clients have trained the round that is played again; they answer from their states before it."""
    federation = make_federation(
        defense=defense, clients=3, plan=FederationPlan(rounds=4), aggregator=FedAvg(scheme="I")
    )
    expected = whole(play(grid_for(federation), federation, run="a"))
    states: list[FederationState] = []

    def stops(sent: Message, reply: Message) -> Message:
        if sent.metadata.message_type == "train" and sent.metadata.group_id == "2" and sent.metadata.dst_node_id == 993:
            raise Stop
        return reply

    with pytest.raises(Stop):
        play(
            grid_for(federation, state_dir=tmp_path, change=stops),
            federation,
            run="a",
            after_round=lambda outcome, state: states.append(state),
        )
    assert states[-1].server.round == 2
    again = play(grid_for(federation, state_dir=tmp_path), federation, states[-1], run="a")
    assert whole(again) == expected
    for path in tmp_path.glob("*.state"):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_round_is_answered_once_and_never_for_another_model(make_federation: MakeFederation, tmp_path: Path) -> None:
    """Two answers under the same noise would give away their difference."""
    federation = make_federation(defense=AdditiveNoise(), plan=FederationPlan(rounds=1))
    final = play(grid_for(federation, state_dir=tmp_path), federation, run="a")
    other = FederationState(replace(final.server, round=0))
    with pytest.raises(RoundFailedError, match="the client declined; its own log says why"):
        play(grid_for(federation, state_dir=tmp_path), federation, other, run="a")
    longer = replace(federation, plan=FederationPlan(rounds=2))
    rest = play(grid_for(longer, state_dir=tmp_path), longer, final, run="a")
    assert rest.server.round == 2
    assert whole(play(grid_for(longer, state_dir=tmp_path), longer, run="a")) == whole(rest), "sent again, not computed"
    play(grid_for(federation, state_dir=tmp_path), federation, run="another")


def test_a_damaged_state_stops_the_client(make_federation: MakeFederation, tmp_path: Path) -> None:
    federation = make_federation(plan=FederationPlan(rounds=2, min_clients=4))
    state = play(grid_for(federation, state_dir=tmp_path), federation, run="a", until=1)
    path = next(tmp_path.glob("client-003-*.state"))
    path.write_bytes(path.read_bytes()[:-4])
    outcomes: list[RoundOutcome] = []
    play(
        grid_for(federation, state_dir=tmp_path),
        federation,
        state,
        run="a",
        after_round=lambda outcome, _: outcomes.append(outcome),
    )
    assert outcomes[0].failures == {"client-003": "the client declined; its own log says why"}


def test_the_name_of_a_run_never_becomes_a_path(make_federation: MakeFederation, tmp_path: Path) -> None:
    federation = make_federation(plan=FederationPlan(rounds=1))
    play(grid_for(federation, state_dir=tmp_path / "deep"), federation, run="../../elsewhere")
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_a_request_with_too_little_or_too_much_in_it_is_refused(make_federation: MakeFederation) -> None:
    federation = make_federation(plan=FederationPlan(rounds=1))
    grid = grid_for(federation)
    heads: list[Mapping[str, Any]] = [
        {},
        {"run": "a", "session": "s", "epoch": -1, "turn": 0},
        {"run": "a", "session": "s", "epoch": 0, "turn": 0},
        {"run": "a", "session": "s", "epoch": 0, "turn": "0"},
    ]
    asked = ArrayRecord({"bytes": Array(np.zeros(3, dtype=np.uint8))})
    messages = [
        Message(RecordDict({"leaktight": ConfigRecord(dict(head)), "leaktight.request": asked}), 1000, "train")
        for head in heads
    ]
    replies = [read_reply(reply) for reply in grid.send_and_receive(messages)]
    unplaced = Failed("the client's app raised an error; see its log")
    assert sorted(map(str, replies)) == sorted(map(str, [unplaced] * 3 + [Declined()]))
