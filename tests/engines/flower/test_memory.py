"""A server that tries to get more out of a node than one answer to each request."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.damage import flipped
from tests.engines.flower.grids import LocalGrid, take_identity
from tests.engines.flower.test_play import grid_for

from leaktight.core.checksum import with_checksum, without_checksum
from leaktight.core.errors import LeaktightError
from leaktight.core.protocols import Defense, Question, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, cloned, pack, parameters_of, unpack
from leaktight.core.types import Broadcast, Params, State
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.stack import Stack
from leaktight.engines.flower.memory import Entry, Memory
from leaktight.engines.flower.messages import Place, model_record, read_reply, read_request, request_message
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client, ClientRound
from leaktight.fl.consent import Consent
from leaktight.fl.federation import Federation
from leaktight.fl.messages import Answered, Ask, Declined, Evaluate, Evaluated, Outcome, Request, Train, Trained
from leaktight.fl.plan import FederationPlan
from leaktight.fl.state import ClientState

from flwr.app import Message  # isort: skip

MakeFederation = Callable[..., Federation]
NODE, CLIENT = 1000, "client-000"


@dataclass(frozen=True)
class Promises(AdditiveNoise):
    """Says that it is private; what it promises does not matter here."""

    @property
    def private(self) -> bool:
        return True


def message(request: Request, run: str = "a", session: str = "one", epoch: int = 0, turn: int = 0) -> Message:
    take_identity()
    model = None if isinstance(request, Ask) else model_record(request.broadcast)
    return request_message(request, model, Place(run, session, epoch, turn), NODE, 60.0)


def raw(grid: LocalGrid, request: Request, **place: Any) -> Message:
    (reply,) = grid.send_and_receive([message(request, **place)])
    return reply


def ask(grid: LocalGrid, request: Request, **place: Any) -> Outcome:
    return read_reply(raw(grid, request, **place))


def sent_bytes(reply: Message) -> bytes:
    return reply.content.array_records["leaktight.reply"]["bytes"].numpy().tobytes()


def model(federation: Federation, number: int = 0, moved: float = 0.0) -> Broadcast:
    net = federation.trainer.model
    params = {name: tensor + moved for name, tensor in cloned(parameters_of(net)).items()}
    return Broadcast(params, cloned(buffers_of(net)), number)


def train(federation: Federation, number: int = 0, moved: float = 0.0) -> Train:
    return Train(model(federation, number, moved), 0.1)


def score(federation: Federation, moved: float) -> Evaluate:
    return Evaluate(model(federation, 1, moved), "validation")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The clients that really trained, in order."""
    calls: list[str] = []
    before = Client.train_round

    def counted(self: Client, request: Train, state: ClientState | None) -> ClientRound:
        calls.append(self.name)
        return before(self, request, state)

    monkeypatch.setattr(Client, "train_round", counted)
    return calls


@pytest.fixture
def federation(make_federation: MakeFederation) -> Federation:
    return make_federation(clients=2, plan=FederationPlan(rounds=3), defense=AdditiveNoise(noise_std=0.1))


def test_another_name_of_the_run_begins_no_new_budget(federation: Federation, tmp_path: Path) -> None:
    limited = replace(federation, consent=Consent(max_rounds=1))
    for folder, each in (("limited", limited), ("private", federation.with_defense(Promises(noise_std=0.1)))):
        grid = grid_for(each, state_dir=tmp_path / folder, reproducible=False)
        assert isinstance(ask(grid, Train(model(each), 1e9), run="refused"), Declined)
        assert isinstance(ask(grid, train(each)), Trained)
        for number in range(5):
            assert isinstance(ask(grid, train(each), run=f"run {number}"), Declined)
        restarted = grid_for(each, state_dir=tmp_path / folder, reproducible=False)
        assert isinstance(ask(restarted, train(each), run="b"), Declined)
        claimed = tmp_path / folder / f"{CLIENT}.run"
        assert f"remove {claimed} to allow another" in (tmp_path / folder / f"{CLIENT}.log").read_text()
        assert claimed.stat().st_mode & 0o777 == 0o600
        claimed.unlink()
        assert isinstance(ask(restarted, train(each), run="b"), Trained)


def test_another_name_of_the_run_begins_no_new_budget_in_flowers_context(federation: Federation) -> None:
    private = federation.with_defense(Promises(noise_std=0.1))
    grid = grid_for(private, reproducible=False)
    assert isinstance(ask(grid, train(private)), Trained)
    assert isinstance(ask(grid, train(private), run="b"), Declined)
    assert isinstance(ask(grid, train(private, 1), epoch=1), Trained)


def test_who_promises_and_limits_nothing_takes_part_in_several_runs(federation: Federation, tmp_path: Path) -> None:
    grid = grid_for(federation, state_dir=tmp_path, reproducible=False)
    assert isinstance(ask(grid, train(federation)), Trained)
    assert isinstance(ask(grid, train(federation), run="b"), Trained)


@pytest.mark.parametrize("consent", [Consent(max_rounds=2), Consent(max_epsilon=1.0)], ids=["rounds", "epsilon"])
def test_a_limit_needs_a_folder_that_remembers_it(
    federation: Federation, consent: Consent, trained: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    limited = replace(federation, consent=consent)
    assert isinstance(ask(grid_for(limited), train(limited)), Declined)
    assert trained == []
    assert "expected a state-dir" in caplog.text


def test_two_sessions_get_no_second_score_of_a_round(make_federation: MakeFederation, tmp_path: Path) -> None:
    plan = FederationPlan(rounds=3, evaluate="clients")
    federation = make_federation(clients=2, plan=plan, aggregator=FedAvg(scheme="I"))
    grid = grid_for(federation, state_dir=tmp_path)
    first = train(federation)
    assert isinstance(ask(grid, first), Trained)
    assert isinstance(ask(grid, score(federation, 0.0), turn=1), Evaluated)
    for number in range(2, 6):
        assert isinstance(ask(grid, first, session="two"), Trained)
        assert isinstance(ask(grid, first), Trained)
        assert isinstance(ask(grid, score(federation, 0.01 * number), turn=number), Declined)


def test_two_sessions_get_no_second_update_of_a_round(make_federation: MakeFederation, tmp_path: Path) -> None:
    defense = Stack(parts=(Lrp(spread=0.5), AdditiveNoise(noise_std=0.1)))
    federation = make_federation(clients=2, plan=FederationPlan(rounds=3), defense=defense)
    federation = replace(federation, consent=Consent(max_rounds=1))
    grid = grid_for(federation, state_dir=tmp_path)
    first = Ask(Question(next(iter(defense.questions)), {}), "defense")
    assert isinstance(ask(grid, first), Answered)
    assert isinstance(ask(grid, train(federation), turn=1), Trained)
    for number in range(2, 6):
        assert isinstance(ask(grid, first, session="two"), Answered)
        assert isinstance(ask(grid, first), Answered)
        assert isinstance(ask(grid, train(federation, 0, 1e-4 * number), turn=number), Declined)


def test_turns_do_not_go_back(federation: Federation, tmp_path: Path) -> None:
    """A request with an earlier turn than the last one is refused, even if it is new."""
    grid = grid_for(federation, state_dir=tmp_path)
    assert isinstance(ask(grid, train(federation), turn=3), Trained)
    assert isinstance(ask(grid, train(federation, moved=0.1), turn=3), Declined)
    log = tmp_path / f"{CLIENT}.log"
    assert "another request of round 1 was answered already" in log.read_text()
    assert isinstance(ask(grid, train(federation, moved=0.1), turn=1), Declined)
    assert "arrived after a later one" in log.read_text()
    assert isinstance(ask(grid, train(federation, 2), epoch=2), Trained)
    assert isinstance(ask(grid, train(federation, moved=0.1), turn=3), Declined)
    assert "asked for round 1 again, after round 3" in log.read_text()
    assert isinstance(ask(grid, train(federation), turn=3), Trained), "the same request gets the same bytes"


@pytest.mark.parametrize("reproducible", [False, True])
def test_the_same_request_gets_the_same_bytes_and_no_work(
    federation: Federation, tmp_path: Path, trained: list[str], reproducible: bool
) -> None:
    first = sent_bytes(raw(grid_for(federation, state_dir=tmp_path, reproducible=reproducible), train(federation)))
    (state,) = tmp_path.glob("*.state")
    held = state.read_bytes()
    restarted = grid_for(federation, state_dir=tmp_path, reproducible=reproducible)
    for session in ("two", "one", "three"):
        assert sent_bytes(raw(restarted, train(federation), session=session)) == first
    assert trained == [CLIENT]
    assert state.read_bytes() == held


def other_data(federation: Federation) -> Federation:
    return federation.with_examples(replace(federation.examples, inputs=255 - federation.examples.inputs))


@pytest.mark.parametrize(
    "changed",
    [
        lambda federation: federation.with_defense(AdditiveNoise(noise_std=0.2)),
        lambda federation: federation.with_trainer(local=replace(federation.trainer.local, momentum=0.1)),
        lambda federation: replace(federation, setup=replace(federation.setup, aggregator=FedAvg(scheme="I"))),
        other_data,
    ],
    ids=["noise", "momentum", "aggregator", "data"],
)
def test_a_state_goes_with_its_data_and_settings(
    federation: Federation, tmp_path: Path, changed: Callable[[Federation], Federation], trained: list[str]
) -> None:
    """The same noise at another scale, or over other data, would fall out of a difference."""
    assert isinstance(ask(grid_for(federation, state_dir=tmp_path), train(federation)), Trained)
    other = changed(federation)
    restarted = grid_for(other, state_dir=tmp_path)
    assert isinstance(ask(restarted, train(federation), session="two"), Declined)
    assert isinstance(ask(restarted, train(federation, 1), epoch=1), Declined)
    assert trained == [CLIENT]
    assert "expected the data and the settings" in (tmp_path / f"{CLIENT}.log").read_text()
    assert isinstance(ask(grid_for(federation, state_dir=tmp_path), train(federation, 1), epoch=1), Trained)


@dataclass(frozen=True)
class Fails(Defense):
    """Raises what is left in its list."""

    errors: list[BaseException] = field(default_factory=list, repr=False)

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        if self.errors:
            raise self.errors.pop()
        return step.gradient, state


def test_a_failure_is_final(make_federation: MakeFederation, tmp_path: Path, trained: list[str]) -> None:
    """Otherwise whether a model of the server's choice makes a client fail could be asked for ever."""
    defense = Fails([ZeroDivisionError("patient 4711")])
    federation = make_federation(clients=2, plan=FederationPlan(rounds=3), defense=defense)
    grid = grid_for(federation, state_dir=tmp_path)
    assert isinstance(ask(grid, train(federation)), Declined)
    assert "patient 4711" in (tmp_path / f"{CLIENT}.log").read_text()
    assert defense.errors == []
    assert isinstance(ask(grid, train(federation)), Declined)
    assert isinstance(ask(grid, train(federation), session="two"), Declined)
    assert trained == [CLIENT], "the same request is not tried again"
    assert isinstance(ask(grid, train(federation, moved=0.1), turn=1), Declined)
    assert "asked for round 1 after round 1" in (tmp_path / f"{CLIENT}.log").read_text()
    assert isinstance(ask(grid, train(federation, 1), epoch=1), Trained)


def test_a_request_that_is_not_admitted_leaves_nothing(federation: Federation, tmp_path: Path) -> None:
    grid = grid_for(federation, state_dir=tmp_path)
    assert isinstance(ask(grid, Train(model(federation), 1e9)), Declined)
    assert list(tmp_path.glob("*.state")) == []
    assert isinstance(ask(grid, train(federation)), Trained)


def test_a_killed_node_answers_after_its_restart(make_federation: MakeFederation, tmp_path: Path) -> None:
    defense = Fails([KeyboardInterrupt()])
    federation = make_federation(clients=2, plan=FederationPlan(rounds=3), defense=defense)
    with pytest.raises(KeyboardInterrupt):
        ask(grid_for(federation, state_dir=tmp_path), train(federation))
    assert isinstance(ask(grid_for(federation, state_dir=tmp_path), train(federation)), Trained)


@dataclass(frozen=True)
class Meets(Defense):
    """Lets two rounds of training overlap."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2), repr=False)

    def on_round(self, plan: Any, state: State, *, rng: Rng, report: Report) -> tuple[Any, State]:
        self.barrier.wait(timeout=60)
        return plan, state


def test_of_two_answers_at_the_same_time_one_is_sent(make_federation: MakeFederation, tmp_path: Path) -> None:
    federation = make_federation(clients=2, plan=FederationPlan(rounds=3), defense=Meets(), dropout=0.0)
    replies: list[Outcome] = []

    def once(moved: float) -> None:
        replies.append(ask(grid_for(federation, state_dir=tmp_path), train(federation, 0, moved)))

    threads = [threading.Thread(target=once, args=(moved,)) for moved in (0.0, 0.1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(reply).__name__ for reply in replies) == ["Declined", "Trained"]
    assert "answered at the same time" in (tmp_path / f"{CLIENT}.log").read_text()


def test_an_older_state_is_refused_by_name(federation: Federation, tmp_path: Path) -> None:
    assert isinstance(ask(grid_for(federation, state_dir=tmp_path), train(federation)), Trained)
    (path,) = tmp_path.glob("*.state")
    held = unpack(without_checksum(path.read_bytes(), "", remedy=""))
    path.write_bytes(with_checksum(pack({**held, "version": 2})))
    assert isinstance(ask(grid_for(federation, state_dir=tmp_path), train(federation)), Declined)
    assert "has version 2, expected 4" in (tmp_path / f"{CLIENT}.log").read_text()


def test_a_memory_does_not_show_its_secrets() -> None:
    key = bytes(range(32))
    state = {"lrp": torch.full((1,), 4711.0)}
    shown = repr(Memory(run="a", brings="b", key=key, base=state, log=(Entry(0, 0, "c", b"4711", state),)))
    assert repr(key) not in shown
    assert "4711" not in shown


@pytest.mark.parametrize(
    "change",
    [
        lambda broadcast: Train(replace(broadcast, model="x"), 0.1),
        lambda broadcast: Evaluate(replace(broadcast, model="x"), "validation"),
        lambda broadcast: Ask(Question("lrp_key", {}), "guard"),  # type: ignore[arg-type]
    ],
    ids=["train", "evaluate", "ask"],
)
def test_networks_and_questions_to_others_do_not_travel(
    federation: Federation, change: Callable[[Broadcast], Request]
) -> None:
    with pytest.raises(LeaktightError, match="not a request of this protocol"):
        read_request(message(change(model(federation))))


def test_a_flipped_bit_of_a_memory_is_refused(federation: Federation, tmp_path: Path) -> None:
    assert isinstance(ask(grid_for(federation, state_dir=tmp_path), train(federation)), Trained)
    (path,) = tmp_path.glob("*.state")
    for place in flipped(path, 8):
        for epoch in (0, 1):
            restarted = grid_for(federation, state_dir=tmp_path)
            assert isinstance(ask(restarted, train(federation, epoch), epoch=epoch), Declined), place
        said = (tmp_path / f"{CLIENT}.log").read_text()
        assert "is damaged" in said, place
        assert "restore it, or start a new run" in said, place
        (tmp_path / f"{CLIENT}.log").unlink()
    assert isinstance(ask(grid_for(federation, state_dir=tmp_path), train(federation, 1), epoch=1), Trained)


def test_a_nodes_folder_is_its_owners_alone_and_keeps_no_leftovers_of_its_own(
    federation: Federation, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    before = os.umask(0o022)
    try:
        assert isinstance(ask(grid_for(federation, state_dir=folder), train(federation)), Trained)
        assert isinstance(ask(grid_for(federation, state_dir=folder), train(federation, 0, 0.1)), Declined)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {
        path.name: "0o600" for path in folder.iterdir()
    }
    (state,) = folder.glob("*.state")
    own, other = folder / ".partial-own" / state.name, folder / ".partial-other" / "client-001-1.state"
    for path in (own, other):
        path.parent.mkdir()
        path.write_bytes(b"half")
    assert isinstance(ask(grid_for(federation, state_dir=folder), train(federation, 1), epoch=1), Trained)
    assert not own.parent.exists()
    assert other.exists(), "another node may be writing it"
