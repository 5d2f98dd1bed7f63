"""One node among many that stalls, lies, floods or takes the name of another."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.flower.grids import LocalGrid, StallingGrid, nodes

from leaktight.core import tensors
from leaktight.core.errors import UntrustedError, UsageError
from leaktight.engines.flower.carrier import GridCarrier
from leaktight.engines.flower.identity import identity_in, new_identity
from leaktight.engines.flower.keybook import KeyBook
from leaktight.engines.flower.messages import HELLO, read_reply, reply_message
from leaktight.engines.flower.node import NodeSettings, client_app
from leaktight.engines.flower.registry import Registry
from leaktight.engines.flower.server import key_book, play
from leaktight.fl import messages
from leaktight.fl.federation import Federation
from leaktight.fl.limits import Limits
from leaktight.fl.messages import Answered, decode, encode
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict, UserConfig  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip

MakeFederation = Callable[..., Federation]


def test_a_node_that_stalls_loses_nobody_elses_update(make_federation: MakeFederation) -> None:
    federation = make_federation(plan=FederationPlan(rounds=2, min_clients=1, timeout=1.5))
    app = client_app(lambda message, context: NodeSettings(federation, None, True))
    grid = StallingGrid(
        app,
        nodes(len(federation.shares)),
        lambda sent: sent.metadata.message_type == "train" and sent.metadata.dst_node_id == 1000,
    )
    outcomes: list[RoundOutcome] = []
    began = time.monotonic()
    play(grid, federation, run="a", after_round=lambda outcome, _: outcomes.append(outcome))
    for outcome in outcomes:
        assert set(outcome.failures) == {"client-000"}
        assert "no answer within 1.5 s" in outcome.failures["client-000"]
    assert time.monotonic() - began < 12


def app_of(federation: Federation, folder: Path | None = None) -> ClientApp:
    """Every node has a folder of its own, as nodes have."""

    def load(message: Message, context: Context) -> NodeSettings:
        return NodeSettings(federation, None if folder is None else folder / str(context.node_id), True)

    return client_app(load)


def nodes_of(grid: LocalGrid, federation: Federation, keys: KeyBook) -> dict[str, int]:
    carrier = GridCarrier(grid, sorted(federation.shares), "a", keys=keys)
    carrier.gather(0.0)
    return dict(carrier.nodes)


def test_a_name_belongs_to_the_key_that_took_it_first(make_federation: MakeFederation, tmp_path: Path) -> None:
    """A second registered node cannot have it while the first is there, after it is gone, or after a restart."""
    federation, book = make_federation(plan=FederationPlan(rounds=1, min_clients=4)), tmp_path / "server" / "keys.json"
    app, honest = app_of(federation, tmp_path), nodes(5)
    thief: dict[int, UserConfig] = {5: {"client": "client-000"}}
    first = nodes_of(LocalGrid(app, honest), federation, KeyBook(book))
    assert first["client-000"] == 1000
    assert book.stat().st_mode & 0o777 == 0o600
    assert nodes_of(LocalGrid(app, {**honest, **thief}), federation, KeyBook(book)) == first
    alone = {node: said for node, said in honest.items() if node != 1000}
    assert "client-000" not in nodes_of(LocalGrid(app, {**alone, **thief}), federation, KeyBook(book))
    moved = app_of(federation, tmp_path)  # the same key at another number: registered again
    (tmp_path / "77").mkdir()
    shutil.copy(tmp_path / "1000" / "client-000.key", tmp_path / "77")
    found = nodes_of(LocalGrid(moved, {**alone, 77: {"partition-id": 0}, **thief}), federation, KeyBook(book))
    assert found["client-000"] == 77
    for path in tmp_path.glob("*/client-000.key"):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_thief_in_the_same_process_gets_nothing(make_federation: MakeFederation, tmp_path: Path) -> None:
    """The node of a client goes away in the middle of a run, and another says that it is that client."""
    federation = make_federation(plan=FederationPlan(rounds=2, min_clients=4))
    app = app_of(federation, tmp_path)
    grids: list[LocalGrid] = []

    def stolen(sent: Message, reply: Message) -> Message:
        if sent.metadata.message_type == "train" and sent.metadata.group_id == "0":
            grids[0].contexts.pop(1000, None)
            grids[0].contexts[5] = Context(1, 5, {"client": "client-000"}, RecordDict(), {})
        return reply

    grids.append(LocalGrid(app, nodes(5), stolen))
    outcomes: list[RoundOutcome] = []
    play(grids[0], federation, run="a", after_round=lambda outcome, _: outcomes.append(outcome))
    assert outcomes[0].failures == {}
    assert outcomes[1].failures == {"client-000": "it has no node"}


class LateGrid(LocalGrid):
    """The replies of one node come after half a second."""

    late = 0
    began = 0.0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = time.monotonic() > self.began + 0.5
        asked = [each for each in message_ids if each in self.waiting]
        return super().pull_messages([each for each in asked if ready or self.sender(each) != self.late])

    def sender(self, message_id: str) -> int:
        return next(each.metadata.dst_node_id for each in self.sent if each.metadata.message_id == message_id)


def test_a_thief_that_is_quicker_than_the_owner_of_a_name_ends_no_waiting(
    make_federation: MakeFederation, tmp_path: Path
) -> None:
    federation, book = make_federation(), tmp_path / "keys.json"
    app, honest = app_of(federation, tmp_path), nodes(5)
    first = nodes_of(LocalGrid(app, honest), federation, KeyBook(book))
    grid = LateGrid(app, {**honest, 5: {"client": "client-000"}})
    grid.late, grid.began = 1000, time.monotonic()
    registry = Registry(grid, sorted(federation.shares), KeyBook(book))
    registry.meet(registry.clients, 5.0)
    assert registry.nodes == first


def test_the_folder_of_a_nodes_key_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        identity_in(tmp_path / "states" / "node", "client-000")
    finally:
        os.umask(before)
    assert (tmp_path / "states" / "node").stat().st_mode & 0o777 == 0o700


def test_the_operators_list_decides(make_federation: MakeFederation, tmp_path: Path) -> None:
    federation = make_federation(plan=FederationPlan(rounds=1))
    app = app_of(federation, tmp_path)
    ours = {
        f"client-{place:03d}": identity_in(tmp_path / str(node), f"client-{place:03d}")
        for place, node in enumerate(nodes(5))
    }
    listed = tmp_path / "nodes.toml"
    listed.write_text(
        "\n".join(f'{name} = "{each.public.hex()}"' for name, each in ours.items() if name != "client-004")
    )
    keys = key_book(tmp_path / "server", listed)
    found = nodes_of(LocalGrid(app, {**nodes(5), 5: {"client": "client-001"}}), federation, keys)
    assert sorted(found) == ["client-000", "client-001", "client-002", "client-003"]
    assert found["client-001"] == 993
    assert not (tmp_path / "server" / "keys.json").exists()
    listed.write_text('client-000 = "12"')
    with pytest.raises(UsageError, match="expected a line"):
        key_book(tmp_path, listed)
    with pytest.raises(UsageError, match=r"none\.toml"):
        key_book(tmp_path, tmp_path / "none.toml")


def in_place(change: Callable[[Message, Message], Message]) -> Callable[[Message, Message], Message]:
    """What the node of client-000 sends in place of its answer to train."""
    return lambda sent, reply: (
        change(sent, reply) if sent.metadata.message_type == "train" and sent.metadata.dst_node_id == 1000 else reply
    )


def failures_of(federation: Federation, change: Callable[[Message, Message], Message], **given: Any) -> list[str]:
    """Why client-000 is left out, by round; everybody else has to be in."""
    outcomes: list[RoundOutcome] = []
    grid = LocalGrid(app_of(federation, **given), nodes(len(federation.shares)), in_place(change))
    play(grid, federation, run="a", after_round=lambda outcome, _: outcomes.append(outcome))
    for outcome in outcomes:
        assert set(outcome.failures) <= {"client-000"}
    return [outcome.failures.get("client-000", "") for outcome in outcomes]


def test_a_reply_is_good_for_its_own_request_only(make_federation: MakeFederation, tmp_path: Path) -> None:
    """The same signed message again, in the next round; the same with another's signature; and with none."""
    federation = make_federation(plan=FederationPlan(rounds=2, min_clients=4))
    first: list[Message] = []

    def again(sent: Message, reply: Message) -> Message:
        first.append(reply)
        return Message(first[0].content, reply_to=sent)

    unsigned = "the answer is refused: it is not signed by this client for this request"
    assert failures_of(federation, again, folder=tmp_path / "a") == ["", unsigned]
    stranger = new_identity()

    def forged(sent: Message, reply: Message) -> Message:
        return reply_message(read_reply(reply), sent, "client-000", stranger)  # type: ignore[arg-type]

    assert failures_of(federation, forged, folder=tmp_path / "b") == [unsigned] * 2

    def bare(sent: Message, reply: Message) -> Message:
        return Message(RecordDict({"leaktight.reply": reply.content["leaktight.reply"]}), reply_to=sent)

    assert failures_of(federation, bare, folder=tmp_path / "c") == [unsigned] * 2


def test_a_node_that_does_not_prove_its_name_has_none(make_federation: MakeFederation) -> None:
    federation = make_federation(plan=FederationPlan(rounds=1))

    def unproven(sent: Message, reply: Message) -> Message:
        if sent.metadata.message_type == HELLO and sent.metadata.dst_node_id == 1000:
            said = reply.content.config_records["leaktight.client"]
            return Message(
                RecordDict({"leaktight.client": ConfigRecord({**said, "signature": b"x" * 64})}), reply_to=sent
            )
        return reply

    found = nodes_of(LocalGrid(app_of(federation), nodes(5), unproven), federation, KeyBook())
    assert sorted(found) == ["client-001", "client-002", "client-003", "client-004"]


SMALL = Limits(most_bytes=100_000, longest_text=50, most_tensors=10, most_items=100)


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        ({"a": torch.zeros(200_000)}, "bytes"),
        ({str(number): torch.zeros(1) for number in range(50)}, "tensors"),
        ({"a": "x" * 51}, "letters in a text"),
        ({"x" * 51: 1}, "letters in a text"),
        ({"a": list(range(200))}, "items"),
        ({"a": [[[]] * 40] * 3}, "items"),
        ({"a": 10**400}, "the size of a number"),
    ],
    ids=["huge", "tensors", "text", "name", "list", "nested", "number"],
)
def test_what_is_beyond_the_limits_is_refused(payload: dict[str, Any], what: str) -> None:
    data = encode({"reply": Answered(payload)})
    assert "reply" in decode(data)
    with pytest.raises(UntrustedError, match=what):
        decode(data, SMALL)


def test_bytes_of_tensors_count_as_no_items() -> None:
    values = torch.frombuffer(bytearray(b',[{"data_offsets"' * 1000), dtype=torch.uint8)
    assert decode(encode({"reply": Answered({"a": values})}), SMALL)["reply"].payload["a"].shape == (17_000,)


def test_a_huge_array_is_refused_before_it_is_decoded(make_federation: MakeFederation, tmp_path: Path) -> None:
    """200 MB, and an array that says it has 8 TB."""
    federation = make_federation(plan=FederationPlan(rounds=1, min_clients=4))
    read: list[int] = []
    unpacked = tensors.unpack

    def watched(data: bytes) -> Any:
        read.append(len(data))
        return unpacked(data)

    def huge(sent: Message, reply: Message) -> Message:
        return reply_message(bytes(200 * 2**20), sent, "client-000", identity_in(tmp_path / "1000", "client-000"))

    def boasting(sent: Message, reply: Message) -> Message:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (2**43,)})
        array = Array("uint8", (2**43,), "numpy.ndarray", head.getvalue())
        return Message(RecordDict({"leaktight.reply": ArrayRecord({"bytes": array})}), reply_to=sent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "unpack", watched)
        (reason,) = failures_of(federation, huge, folder=tmp_path)
        assert "209715328 bytes, more than" in reason
        assert max(read) < 10**6
        assert failures_of(federation, boasting, folder=tmp_path) == ["the answer cannot be read (ValueError)"]


def test_a_node_that_never_says_who_it_is_holds_up_nobody(make_federation: MakeFederation) -> None:
    federation = make_federation(plan=FederationPlan(rounds=2, min_clients=4, timeout=1.0))
    stalls = StallingGrid(
        app_of(federation),
        nodes(len(federation.shares)),
        lambda sent: sent.metadata.message_type == HELLO and sent.metadata.dst_node_id == 1000,
        blocked=30.0,
        late=0.0,
    )
    outcomes: list[RoundOutcome] = []
    began = time.monotonic()
    play(stalls, federation, run="a", join_seconds=2.0, after_round=lambda outcome, _: outcomes.append(outcome))
    assert [outcome.failures for outcome in outcomes] == [{"client-000": "it has no node"}] * 2
    assert time.monotonic() - began < 25
