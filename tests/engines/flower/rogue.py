"""A SuperNode in a thread, over Flower's real transport: it answers like an honest client, or as its owner likes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from tests.engines.flower.deployment import NAME, Deployment, make_key

import leaktight.engines.flower  # noqa: F401  # switches Flower's telemetry off before Flower is imported
from leaktight.engines.flower.node import NodeSettings, client_app
from leaktight.fl.federation import Federation

from flwr.app import Context, Message, RecordDict  # isort: skip
from flwr.supercore.inflatable.inflatable_object import (  # isort: skip
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects  # isort: skip
from flwr.supernode import fleet_http_connection  # isort: skip

ONE_AT_A_TIME = threading.Lock()
"""Training seeds the generators of the process."""


def _refused(code: int, message: str | None = None, **rest: Any) -> None:
    raise ConnectionError(message)


vars(fleet_http_connection)["flwr_exit"] = _refused  # Flower's own would end the process of the tests


@dataclass(frozen=True)
class Parcel:
    """What a node sends. announced: the message whose parts it lists. sends: whether it sends these parts."""

    announced: Message
    sends: bool = True


Speak = Callable[[Message, Message], Parcel]
"""What a node sends to a message (first) in place of the honest reply (second)."""


def honest(message: Message, reply: Message) -> Parcel:
    return Parcel(reply)


@dataclass
class ThreadNode:
    """A registered node. name: of its key. said: its node config. speak: what it sends."""

    deployment: Deployment
    name: str
    federation: Federation
    said: dict[str, Any]
    speak: Speak = honest
    register: bool = True
    error: BaseException | None = None
    joined: threading.Event = field(default_factory=threading.Event)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def state_dir(self) -> Path:
        return self.deployment.folder / f"state-{self.name}"

    def made_key(self) -> Path:
        """The key with which the node proves to the SuperLink who it is; made, and registered, once."""
        key = self.deployment.folder / f"{self.name}.key"
        if not key.exists():
            make_key(key)
            if self.register:
                done = self.deployment.flwr("supernode", "register", str(key.with_suffix(".pub")), NAME)
                assert done.returncode == 0, done.stdout + done.stderr
        return key

    def __enter__(self) -> ThreadNode:
        key = self.made_key()
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, args=(key,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def leave(self) -> None:
        """Leave the federation after the current message."""
        self._stopped.set()

    def stop(self) -> None:
        """Leave the federation, as after Ctrl-C."""
        self.leave()
        if self._thread is not None:
            self._thread.join(60)

    def _run(self, key: Path) -> None:
        try:
            self._serve(key)
        except BaseException as error:
            self.error = error

    def _serve(self, key: Path) -> None:
        private: Any = load_ssh_private_key(key.read_bytes(), None)
        app = client_app(lambda message, context: NodeSettings(self.federation, self.state_dir, reproducible=True))
        address = f"127.0.0.1:{self.deployment.port}"
        keys = private, private.public_key()
        trusted = str(self.deployment.folder / "ca.pem")
        with fleet_http_connection.http_request_response(address, False, trusted, keys, 3, 60.0) as connection:
            number, receive, send, _, _, pull, push, confirm = connection
            context = Context(1, number, self.said, RecordDict(), {})
            self.joined.set()
            while not self._stopped.wait(0.2):
                if (received := receive()) is None:
                    continue
                run = received[0].metadata.run_id
                message = pull_and_inflate_object_from_tree(
                    received[1], partial(pull, run), partial(confirm, run), return_type=Message
                )
                message.metadata.__dict__["_message_id"] = received[0].metadata.message_id
                with ONE_AT_A_TIME:
                    parcel = self.speak(message, app(message, context))
                with no_object_id_recompute():
                    self._send(parcel, run, send, push)

    def _send(self, parcel: Parcel, run: int, send: Any, push: Any) -> None:
        reply = parcel.announced
        reply.metadata.__dict__["_message_id"] = reply.object_id
        wanted, session = send(reply, get_object_tree(reply), 0.0)
        if parcel.sends:
            push_objects(
                get_all_nested_objects(reply),
                lambda name, data: push(run, session, name, data),
                object_ids_to_push=wanted,
            )


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.1)
