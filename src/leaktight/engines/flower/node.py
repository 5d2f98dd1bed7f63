"""The client's side on Flower: a ClientApp that answers requests with `fl.client.Client`."""

from __future__ import annotations

import hashlib
import json
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from leaktight.core.errors import UsageError
from leaktight.core.files import make_private_folder, write_private
from leaktight.engines.flower.identity import Identity, identity_in, identity_in_context
from leaktight.engines.flower.memory import Memory, MemoryStore
from leaktight.engines.flower.messages import HELLO, Envelope, hello_reply, read_request, reply_bytes, reply_message
from leaktight.engines.flower.user_app import refusal
from leaktight.fl.client import Client
from leaktight.fl.federation import Federation
from leaktight.fl.messages import Declined, Reply, Train
from leaktight.fl.state import ClientState
from leaktight.runtime.processes import become_worker

LOG = logging.getLogger("leaktight.flower")


@dataclass(frozen=True)
class NodeSettings:
    """The federation with the node's data, and the folder of private state; None: only Flower's context.

    reproducible: draw from the federation's key, so that a run can be repeated to the bit; that key then reveals all
    noise. Otherwise every run draws a new key, which never leaves the node.
    identity: the key with which the node signs; None: that in its folder, or in Flower's context.
    """

    federation: Federation
    state_dir: Path | None = None
    reproducible: bool = False
    identity: Identity | None = None

    def identity_of(self, name: str, context: Context) -> Identity:
        if self.identity is not None:
            return self.identity
        return identity_in_context(context.state) if self.state_dir is None else identity_in(self.state_dir, name)


Load = Callable[[Message, Context], NodeSettings]


def client_app(load: Load) -> ClientApp:
    """The ClientApp of a node. load: returns the settings of the node; called for every message."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        return answer(message, context, load)

    app.train()(handle)
    app.evaluate()(handle)
    app.query()(handle)
    app.query("hello")(handle)
    return app


def answer(message: Message, context: Context, load: Load) -> Message:
    """Answer one message. Errors are not sent, not even their kind, because they can depend on the data."""
    become_worker()
    folder: Path | None = None
    name = "node"
    identity: Identity | None = None
    try:
        settings = load(message, context)
        folder = settings.state_dir
        name = client_name(settings.federation, context)
        identity = settings.identity_of(name, context)
        if message.metadata.message_type == HELLO:
            return hello_reply(name, identity, message)
        return reply_message(_reply(message, context, settings, name), message, name, identity)
    except Exception:
        _log_error(name, folder)
        return declined(message, name, identity)


def declined(message: Message, name: str, identity: Identity | None) -> Message:
    """The answer to a message that the node does not answer; an error of Flower's where even that cannot be signed."""
    if identity is None or message.metadata.message_type == HELLO:
        return refusal(message)
    try:
        return reply_message(Declined(), message, name, identity)
    except Exception:
        return refusal(message)


def client_name(federation: Federation, context: Context) -> str:
    """The client of this node: `client` of its node config, or the sorted names at index `partition-id`."""
    names = sorted(federation.shares)
    chosen, index = context.node_config.get("client"), context.node_config.get("partition-id")
    if chosen is not None:
        if chosen not in names:
            raise UsageError(f"expected client to be one of {names[0]} ... {names[-1]}, got {chosen!r}")
        return str(chosen)
    if type(index) is not int or not 0 <= index < len(names):
        raise UsageError(f"expected partition-id from 0 to {len(names) - 1} in the node's config, got {index!r}")
    return names[index]


def _reply(message: Message, context: Context, settings: NodeSettings, name: str) -> bytes:
    """The reply as bytes. A repeated request gets the same bytes, and one that failed fails again."""
    asked = read_request(message)
    client = settings.federation.client(name)
    store = MemoryStore(name, context.state, settings.state_dir, _single(settings))
    memory = store.recall(asked.place.run, _data_and_settings_hash(client))
    sent = memory.sent_to(asked)
    if sent is not None:
        return sent
    if not settings.reproducible:
        client = replace(client, rng=client.rng.keyed(memory.key))
    plan, consent, latest = settings.federation.plan, settings.federation.consent, _restored(memory)
    ready = memory.ready_for(asked, consent.max_repeats)
    client, before = replace(client, returns=ready.returns), _restored(ready)
    if ready.returns > memory.returns and latest is not None:
        before = client.gone_back(before, latest)
    try:
        reply, state = _work(client, asked, before, settings)
    except Exception:
        # A failure can depend on the data, so an admitted request is never tried again.
        declined = reply_bytes(Declined())
        failed = client.marked(asked.request, before).stored()
        store.remember(ready.after(asked, declined, failed, keep=plan.keep_checkpoints))
        raise
    sent = reply_bytes(reply)
    store.remember(ready.after(asked, sent, state.stored(), keep=plan.keep_checkpoints))
    return sent


def _restored(memory: Memory) -> ClientState | None:
    return None if memory.now is None else ClientState.restored(memory.now)


def _single(settings: NodeSettings) -> bool:
    """Whether the client answers one run only: its privacy budget and limits would start again with another run."""
    federation = settings.federation
    if federation.consent.limited and settings.state_dir is None:
        raise UsageError(
            "expected a state-dir in the node's config because consent sets a limit, got none; add one: "
            "without it a restart forgets the replies"
        )
    return federation.counts


def _data_and_settings_hash(client: Client) -> str:
    """A hash of the client's data and settings."""
    return hashlib.sha256(f"{client.brings}|{client.setup.aggregator!r}".encode()).hexdigest()


def _work(
    client: Client, asked: Envelope, state: ClientState | None, settings: NodeSettings
) -> tuple[Reply, ClientState]:
    if not isinstance(asked.request, Train):
        return client.handle(asked.request, state)
    done = client.train_round(asked.request, state)
    if settings.state_dir is not None:
        keep = settings.federation.plan.keep_checkpoints
        write_report(settings.state_dir, client.name, asked.place.epoch, done.report, keep=keep)
    return done.trained, done.state


def _log_error(name: str, folder: Path | None) -> None:
    """Write the current exception to the node's log and to a private file beside its state."""
    LOG.error("%s could not answer", name, exc_info=True)
    if folder is None:
        return
    try:
        make_private_folder(folder)
        path = folder / f"{name}.log"
        path.touch(mode=0o600)
        with path.open("a") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')}\n{traceback.format_exc()}\n")
    except OSError:
        LOG.warning("cannot write to %s", folder)


def write_report(folder: Path, client: str, round_index: int, figures: Mapping[str, float], *, keep: int = 1) -> None:
    """Store the figures of a client's last rounds in a private file of its node. round_index: from 0."""
    rounds = {**_reports(folder, client), str(round_index + 1): dict(figures)}
    last = {number: each for number, each in rounds.items() if round_index + 1 - keep < int(number) <= round_index + 1}
    write_private(_report_path(folder, client), json.dumps(last, indent=1))


def read_reports(folder: Path, clients: Iterable[str], round_index: int) -> dict[str, dict[str, float]]:
    """The figures of a round of these clients, for a simulation, which has the files of all nodes."""
    found = {client: _reports(folder, client).get(str(round_index + 1)) for client in clients}
    return {client: figures for client, figures in found.items() if figures is not None}


def _reports(folder: Path, client: str) -> dict[str, dict[str, float]]:
    """The figures of a client's last rounds, by the number of the round."""
    path = _report_path(folder, client)
    stored: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    return stored


def _report_path(folder: Path, client: str) -> Path:
    return folder / f"{client}.report.json"
