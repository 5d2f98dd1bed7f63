"""Faults of a Flower federation: a real SuperLink with TLS and registered keys, and a ServerApp in its own process.

Honest and hostile nodes are threads that use Flower's own connection of SuperNodes, so that a node can send whatever
its owner likes; the node that is killed is a `flower-supernode`.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.engines.flower.deployment import Deployment, wait_for
from tests.engines.flower.rogue import Parcel, ThreadNode, honest, wait_until
from tests.engines.flower.test_deployment import export

from bench.faults.count import Count
from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import load_config
from leaktight.core.tensors import digest
from leaktight.core.types import Update
from leaktight.engines import inprocess
from leaktight.engines.flower.identity import identity_in, new_identity
from leaktight.engines.flower.messages import read_reply, reply_message
from leaktight.fl.federation import Federation
from leaktight.fl.messages import Failed, Outcome, Request, Train, Trained
from leaktight.results.folder import RunFolder

from flwr.app import ConfigRecord, Message, RecordDict  # isort: skip

TRIES = 3
CLIENTS = 4
KEY = bytes(range(32))
ROGUE = "client-003"
PIECE, HUGE = 40 * 2**20, 80 * 2**20
FORGED = "delta\x1b[2J\n2026-11-17 INFO all is well\n"
TIMEOUT = 30
CONFIG = """
[partition]
kind = "iid"
clients = 4
[local]
epochs = 1
[federation]
rounds = {rounds}
per_round = 4
min_clients = 3
timeout = {timeout}
norm_limit = 10.0
"""

Fault = Callable[["Rogue", Message, Message], Parcel]
Part = Callable[[Deployment, Path], Iterator[Count]]


def counts() -> Iterator[Count]:
    """All faults of this part."""
    with tempfile.TemporaryDirectory(prefix="leaktight-faults-") as temporary:
        folder = Path(temporary)
        with Deployment(folder / "deployment") as deployment:
            deployment.start_superlink()
            yield from hostile_nodes(deployment, folder)
            yield from stolen_names(deployment, folder)
            yield from strangers(deployment, folder)
            yield from killed_nodes(deployment, folder)
            yield from killed_superlinks(deployment, folder)


class Rogue:
    """A node that answers the first round honestly, and every later one with the next fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first: Message | None = None

    def __call__(self, message: Message, reply: Message) -> Parcel:
        if message.metadata.message_type != "train":
            return honest(message, reply)
        place = int(message.metadata.group_id)
        if place == 0:
            self.first = reply
            return honest(message, reply)
        return list(FAULTS.values())[place - 1](self, message, reply)

    def signed(self, reply: Any, message: Message) -> Parcel:
        return Parcel(reply_message(reply, message, ROGUE, identity_in(self.folder, ROGUE)))

    def lie(self, message: Message, reply: Message, change: Callable[[Update], Update]) -> Parcel:
        trained = read_reply(reply)
        assert isinstance(trained, Trained)
        return self.signed(Trained(change(trained.update)), message)


def _scaled(update: Update) -> Update:
    return replace(update, tensors={name: -50 * tensor for name, tensor in update.tensors.items()})


def _again(rogue: Rogue, message: Message) -> Parcel:
    assert rogue.first is not None
    return Parcel(Message(rogue.first.content, reply_to=message))


def _anew(rogue: Rogue, message: Message) -> Parcel:
    assert rogue.first is not None
    return rogue.signed(read_reply(rogue.first), message)


FAULTS: Mapping[str, Fault] = {
    "a node announces a reply and sends nothing": lambda rogue, message, reply: Parcel(reply, sends=False),
    "a message without a reply": lambda rogue, message, reply: Parcel(Message(RecordDict(), reply_to=message)),
    "1 kB that is no update": lambda rogue, message, reply: rogue.signed(bytes(1000), message),
    "40 MB in one piece": lambda rogue, message, reply: Parcel(
        Message(RecordDict({"leaktight.reply": ConfigRecord({"huge": bytes(PIECE)})}), reply_to=message)
    ),
    "an update of 80 MB": lambda rogue, message, reply: rogue.signed(bytes(HUGE), message),
    "texts of 30 MB with escape codes": lambda rogue, message, reply: rogue.lie(
        message,
        reply,
        lambda update: replace(update, kind=FORGED * 700_000),  # type: ignore[arg-type]
    ),
    "forged log lines": lambda rogue, message, reply: rogue.lie(
        message,
        reply,
        lambda update: replace(update, kind=FORGED),  # type: ignore[arg-type]
    ),
    "an earlier message replayed": lambda rogue, message, reply: _again(rogue, message),
    "an earlier update, signed anew": lambda rogue, message, reply: _anew(rogue, message),
    "an update scaled by -50": lambda rogue, message, reply: rogue.lie(message, reply, _scaled),
    "a reply signed with another key": lambda rogue, message, reply: Parcel(
        reply_message(read_reply(reply), message, ROGUE, new_identity())  # type: ignore[arg-type]
    ),
}


def hostile_nodes(deployment: Deployment, folder: Path) -> Iterator[Count]:
    """A run of which every round but the first has another fault of one node; the same run in all tries."""
    project, federation = made(folder / "hostile", len(FAULTS) + 1)
    expected = without(federation, ROGUE, since=1)
    held, clean, seconds = dict.fromkeys(FAULTS, 0), 0, []
    for number in range(TRIES):
        rogue = Rogue(deployment.folder / f"state-hostile{number}-3")
        with nodes_of(deployment, federation, f"hostile{number}", {3: rogue}):
            summary = finished(deployment, project, folder / f"hostile-run-{number}")
        rows = summary["rounds"]
        for place, fault in enumerate(FAULTS, start=1):
            held[fault] += left_out(rows[place], silent="nothing" in fault)
        seconds.append(rows[1]["seconds"])
        clean += summary["model_digest"] == expected and is_clean(folder / f"hostile-run-{number}", deployment)
    for fault, times in held.items():
        note = f"the round took {max(seconds):.0f} s with a timeout of {TIMEOUT} s" if "nothing" in fault else ""
        yield Count(fault, "the node is left out of the round, nobody else is", TRIES, times, note)
    wanted = (
        "the model, to the bit, of a run without the node's later updates; no forged line, no escape code in a file"
    )
    yield Count("all of these in one run", wanted, TRIES, clean)


def left_out(row: Mapping[str, Any], *, silent: bool) -> bool:
    """Whether a round left out the rogue and nobody else, and for what it sent, unless it is silent."""
    alone = list(row["failures"]) == [ROGUE] and row["clients"] == CLIENTS - 1
    return alone and (silent or "no answer" not in row["failures"][ROGUE])


def stolen_names(deployment: Deployment, folder: Path) -> Iterator[Count]:
    """A second registered node says that it is client-000: beside the first, after it has gone, and instead of it."""
    project, federation = made(folder / "stolen", 4)
    beside = after = listed = 0
    for number in range(TRIES):
        name = f"stolen{number}"
        thief = ThreadNode(deployment, f"{name}-thief", federation, {"client": "client-000"})
        thief.made_key()
        robbed = Robbed(thief)
        with nodes_of(deployment, federation, name, {0: robbed}) as nodes:
            robbed.node = nodes[0]
            rows = finished(deployment, project, folder / f"{name}-run")["rounds"]
            beside += [row["clients"] for row in rows[:2]] == [CLIENTS, CLIENTS]
            after += list(rows[3]["failures"]) == ["client-000"]
            keys = [
                f'{client} = "{identity_in(node.state_dir, client).public.hex()}"'
                for place, node in nodes.items()
                if (client := f"client-{place:03d}")
            ]
            (deployment.folder / f"{name}.toml").write_text("\n".join(keys))
            more = f'nodes="{deployment.folder / f"{name}.toml"}" join-seconds=20'
            rows = finished(deployment, project, folder / f"{name}-listed", more)["rounds"]
            listed += all(list(row["failures"]) == ["client-000"] for row in rows)
            thief.stop()
    wanted = "it gets no request"
    yield Count("a second registered node takes the name of a client that is there", wanted, TRIES, beside)
    yield Count("... after that client's node has gone", wanted, TRIES, after)
    yield Count("... instead of it, with a list of the operator", wanted, TRIES, listed)


class Robbed:
    """The honest node of client-000: the thief joins in its first round, and it leaves in the third.

    Flower gives up the reply of a node that leaves before the server has pulled it, so the third round may lack it.
    """

    def __init__(self, thief: ThreadNode) -> None:
        self.thief = thief
        self.node: ThreadNode | None = None

    def __call__(self, message: Message, reply: Message) -> Parcel:
        if message.metadata.message_type == "train" and message.metadata.group_id == "0":
            self.thief.__enter__()
            wait_until(self.thief.joined.is_set, 20)
        elif message.metadata.message_type == "train" and message.metadata.group_id == "2" and self.node is not None:
            self.node.leave()
        return honest(message, reply)


def strangers(deployment: Deployment, folder: Path) -> Iterator[Count]:
    """Nodes whose key nobody registered."""
    _, federation = made(folder / "strangers", 1)
    refused = 0
    for number in range(TRIES):
        with ThreadNode(deployment, f"stranger{number}", federation, {"partition-id": 0}, register=False) as node:
            wait_until(lambda node=node: node.error is not None or node.joined.is_set(), 60)  # type: ignore[misc]
            refused += not node.joined.is_set()
    yield Count("a node with a key that was not registered", "the SuperLink refuses it", TRIES, refused)


def killed_nodes(deployment: Deployment, folder: Path) -> Iterator[Count]:
    """A `flower-supernode` is killed (SIGKILL, with its process) while it trains."""
    project, federation = made(folder / "killed", 2)
    expected, held = without(federation, ROGUE), 0
    for number in range(TRIES):
        place = 100 + number
        with nodes_of(deployment, federation, f"killed{number}", {}, leave_out=3):
            deployment.start_node(place, f'secret-seed="{KEY.hex()}" client="{ROGUE}"')
            log = deployment.log(f"node{place}")
            run = deployment.submit(project, said(folder / f"killed-run-{number}", "join-seconds=120"))
            wait_for(lambda log=log: "Receiving: train message" in log.read_text(), 240, log)
            deployment.stop(f"node{place}", signal.SIGKILL)
            status = deployment.end(run, 240)["status"]
        summary = read(folder / f"killed-run-{number}")
        held += status == "finished:completed" and summary["model_digest"] == expected
    yield Count("a node is killed while it trains", "its rounds end with the others", TRIES, held)


def killed_superlinks(deployment: Deployment, folder: Path) -> Iterator[Count]:
    """The SuperLink and the server's process are killed in a round; both are started, and the run submitted, again."""
    project, federation = made(folder / "superlink", 6)
    state = inprocess.run(federation, workers=1).server
    expected, held, waits = digest({**state.params, **state.buffers}), 0, []
    for number in range(TRIES):
        run, name = folder / f"superlink-run-{number}", f"superlink{number}"
        with nodes_of(deployment, federation, name, {}):
            deployment.submit(project, said(run, "join-seconds=120"))
            wait_until(partial(has_checkpoint, run), 240)
            deployment.stop("superlink", signal.SIGKILL)
        began = time.monotonic()
        deployment.start_superlink()
        with nodes_of(deployment, federation, name, {}):
            waits.append(time.monotonic() - began)
            held += finished(deployment, project, run)["model_digest"] == expected
    wanted = "started and submitted again, the run ends in the model, to the bit, of a run that was not interrupted"
    note = f"Flower takes nodes back {max(waits):.0f} s after the restart"
    yield Count("the SuperLink is killed in a round", wanted, TRIES, held, note)


def has_checkpoint(run: Path) -> bool:
    return bool(RunFolder(run).checkpoints)


def made(folder: Path, rounds: int) -> tuple[Path, Federation]:
    """An exported project, and the same federation."""
    folder.mkdir()
    project = export(folder, config=CONFIG.format(rounds=rounds, timeout=TIMEOUT))
    config = load_config(project / "leaktight_app" / "config.toml")
    return project, build_federation(config, *load_data(config)).keyed(KEY)


def without(federation: Federation, client: str, since: int = 0) -> str:
    """The digest of the model if a client does not answer from round `since` on."""
    exchange = inprocess.Carrier.exchange

    def tapped(self: inprocess.Carrier, requests: Mapping[str, Request]) -> Mapping[str, Outcome]:
        replies, asked = exchange(self, requests), requests[client]
        absent = isinstance(asked, Train) and asked.broadcast.round >= since
        return {**replies, client: Failed("no answer")} if absent else replies

    with patch.object(inprocess.Carrier, "exchange", tapped):
        state = inprocess.run(federation, workers=1).server
    return digest({**state.params, **state.buffers})


class nodes_of(ExitStack):
    """Nodes of all clients in threads, by place; `speak`: what some of them say. Waits until all have joined."""

    def __init__(
        self,
        deployment: Deployment,
        federation: Federation,
        name: str,
        speak: Mapping[int, Callable[[Message, Message], Parcel]],
        leave_out: int | None = None,
    ) -> None:
        super().__init__()
        self.nodes = {
            place: ThreadNode(
                deployment, f"{name}-{place}", federation, {"partition-id": place}, speak.get(place, honest)
            )
            for place in range(CLIENTS)
            if place != leave_out
        }

    def __enter__(self) -> Any:
        super().__enter__()
        for node in self.nodes.values():
            self.callback(node.stop)
            end = time.monotonic() + 240
            while True:  # a node that was not stopped is taken back when its heartbeats are missed
                node.error = None
                node.__enter__()
                wait_until(lambda node=node: node.error is not None or node.joined.is_set(), 60)  # type: ignore[misc]
                if node.joined.is_set():
                    break
                assert time.monotonic() < end, node.error
                time.sleep(3)
        return self.nodes


def said(run: Path, more: str = "join-seconds=60") -> str:
    return f'folder="{run}" {more}'


def finished(deployment: Deployment, project: Path, run: Path, more: str = "join-seconds=60") -> dict[str, Any]:
    state = deployment.run(project, said(run, more), 400)
    assert state["status"] == "finished:completed", deployment.log("superlink").read_text()[-4000:]
    return read(run)


def read(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def is_clean(run: Path, deployment: Deployment) -> bool:
    """Whether no file of the run and no log has a client's escape codes or lines, and none is larger than 2 MB."""
    files = [path for path in run.rglob("*") if path.is_file()]
    log = deployment.log("superlink").read_bytes()
    texts = [log, *(path.read_bytes() for path in files if path.suffix in (".json", ".toml"))]
    return all(path.stat().st_size < 2 * 2**20 for path in files) and not any(
        b"\x1b[2J" in text or b"\n2026-11-17 INFO all" in text for text in texts
    )
