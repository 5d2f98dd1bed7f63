"""The client's side on Flower: a ClientApp that answers requests with `fl.client.Client` and keeps what is private."""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from leaktight.core.errors import UsageError
from leaktight.engines.flower.memory import Keeper
from leaktight.engines.flower.messages import HELLO, Envelope, hello_reply, read_request, reply_bytes, reply_message
from leaktight.engines.flower.reports import write_report
from leaktight.fl.client import Client
from leaktight.fl.consent import Consent
from leaktight.fl.federation import Federation
from leaktight.fl.messages import Declined, Reply, Train
from leaktight.fl.state import ClientState
from leaktight.runtime.processes import become_worker

LOG = logging.getLogger("leaktight.flower")


@dataclass(frozen=True)
class Home:
    """What a node has: its federation (the data among it), and where it keeps private state (None: Flower's context).

    reproducible: draw from the federation's key, so that a run can be repeated to the bit. Whoever knows that key then
    knows all noise. Otherwise every run draws a key of its own that never leaves the node.
    """

    federation: Federation
    state_dir: Path | None = None
    reproducible: bool = False


Load = Callable[[Message, Context], Home]


def client_app(load: Load) -> ClientApp:
    """The ClientApp of a node. load: gives the node's own side; it is called for every message."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        return answer(message, context, load)

    app.train()(handle)
    app.evaluate()(handle)
    app.query()(handle)
    app.query("hello")(handle)
    return app


def answer(message: Message, context: Context, load: Load) -> Message:
    """Answer one message. Nothing of an error leaves the node, not even its kind: it can tell about the data."""
    become_worker()
    folder: Path | None = None
    name = "node"
    try:
        home = load(message, context)
        folder = home.state_dir
        name = client_name(home.federation, context)
        if message.metadata.message_type == HELLO:
            return hello_reply(name, message)
        return reply_message(_reply(message, context, home, name), message)
    except Exception:
        _note(name, folder)
        return reply_message(Declined(), message)


def client_name(federation: Federation, context: Context) -> str:
    """Which client this node is: `client` of its node config, or the place `partition-id` in the sorted names."""
    names = sorted(federation.shares)
    chosen, place = context.node_config.get("client"), context.node_config.get("partition-id")
    if chosen is not None:
        if chosen not in names:
            raise UsageError(f"expected client to be one of {names[0]} ... {names[-1]}, got {chosen!r}")
        return str(chosen)
    if type(place) is not int or not 0 <= place < len(names):
        raise UsageError(f"expected partition-id from 0 to {len(names) - 1} in the node's config, got {place!r}")
    return names[place]


def _reply(message: Message, context: Context, home: Home, name: str) -> bytes:
    """The reply as it travels. A request that was answered gets the same bytes, and one that failed fails again."""
    asked = read_request(message)
    client = home.federation.client(name)
    keeper = Keeper(name, context.state, home.state_dir, _single(home))
    memory = keeper.recall(asked.place.run, _brings(client))
    sent = memory.sent_to(asked)
    if sent is not None:
        return sent
    if not home.reproducible:
        client = replace(client, rng=client.rng.keyed(memory.key))
    before = None if memory.now is None else ClientState.restored(memory.now)
    try:
        reply, state = _work(client, asked, before, home.state_dir)
    except Exception:
        # Whether the work fails can tell about the data: a request that was admitted cannot be tried again.
        declined = reply_bytes(Declined())
        keeper.remember(memory.after(asked, declined, client.marked(asked.request, before).stored()))
        raise
    sent = reply_bytes(reply)
    keeper.remember(memory.after(asked, sent, state.stored()))
    return sent


def _single(home: Home) -> bool:
    """Whether the client answers one run only: what it promises or insists on would begin anew with another name."""
    federation = home.federation
    if federation.consent == Consent():
        return federation.setup.defense.private
    if home.state_dir is None:
        raise UsageError(
            "expected a state-dir in the node's config because consent sets a limit, got none; give it one: without, "
            "a restart forgets what was answered"
        )
    return True


def _brings(client: Client) -> str:
    """A hash of the data and the settings behind the client's answers."""
    return hashlib.sha256(f"{client.brings}|{client.setup.aggregator!r}".encode()).hexdigest()


def _work(client: Client, asked: Envelope, state: ClientState | None, folder: Path | None) -> tuple[Reply, ClientState]:
    if not isinstance(asked.request, Train):
        return client.handle(asked.request, state)
    done = client.train_round(asked.request, state)
    if folder is not None:
        write_report(folder, client.name, asked.place.epoch, done.report)
    return done.trained, done.state


def _note(name: str, folder: Path | None) -> None:
    """What went wrong, for the node's own eyes: its log, and a file beside its state."""
    LOG.error("%s could not answer", name, exc_info=True)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.log"
        path.touch(mode=0o600)
        with path.open("a") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')}\n{traceback.format_exc()}\n")
    except OSError:
        LOG.warning("cannot write to %s", folder)
