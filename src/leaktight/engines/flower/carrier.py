"""The server's side of the transport: who is where, what was sent to whom, and what came back."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from leaktight.core.errors import LeaktightError
from leaktight.engines.flower.messages import (
    Place,
    hello_message,
    model_record,
    read_hello,
    read_reply,
    request_message,
)
from leaktight.fl.messages import Ask, Declined, Failed, Outcome, Request, why_declined

LOG = logging.getLogger("leaktight.flower")

POLL_SECONDS = 0.5
HELLO_SECONDS = 60.0


@dataclass
class GridCarrier:
    """Moves requests to the nodes and replies back. The names of clients are known, their nodes are found out.

    timeout: seconds to wait for the answers to one set of requests (None: for ever).
    """

    grid: Grid
    clients: Sequence[str]
    run: str
    timeout: float | None = None
    epoch: int = 0
    after_client: Callable[[], None] = lambda: None
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    nodes: dict[str, int] = field(default_factory=dict)
    _strangers: set[int] = field(default_factory=set)
    _turn: int = 0

    def gather(self, seconds: float) -> None:
        """Wait until every client has a node, or until the time is up; at least one is needed."""
        end = time.monotonic() + seconds
        while True:
            self._meet(max(1.0, end - time.monotonic()))
            missing = [client for client in self.clients if client not in self.nodes]
            if not missing or time.monotonic() > end:
                break
            time.sleep(POLL_SECONDS)
        if not self.nodes:
            raise LeaktightError(f"expected nodes of {len(self.clients)} clients, got none in {seconds:g} s")
        for client in missing:
            LOG.warning("%s has no node; going on without it", client)

    def begin_epoch(self, epoch: int) -> None:
        """The server has stored its state: what is asked from now on follows it."""
        self.epoch, self._turn = epoch, 0

    def exchange(self, requests: Mapping[str, Request]) -> dict[str, Outcome]:
        """Send every request to its client's node, and give the replies by client, sorted by name."""
        self._meet(HELLO_SECONDS if self.timeout is None else self.timeout)
        place = Place(self.run, self.session, self.epoch, self._turn)
        self._turn += 1
        models: dict[int, ArrayRecord] = {}
        sent: dict[str, Message] = {}
        for client, request in sorted(requests.items()):
            if client in self.nodes:
                model = None if isinstance(request, Ask) else _once(models, request)
                sent[client] = request_message(request, model, place, self.nodes[client], self.timeout)
        received = self._send(list(sent.values()), self.timeout)
        replies: dict[str, Outcome] = {}
        for client in sorted(requests):
            replies[client] = self._reply(client, sent.get(client), received)
            self.after_client()
        return replies

    def _reply(self, client: str, message: Message | None, received: Mapping[str, Message]) -> Outcome:
        if message is None:
            reply: Outcome = Failed("it has no node")
        elif message.metadata.message_id not in received:
            reply = Failed("no answer" if self.timeout is None else f"no answer within {self.timeout:g} s")
        else:
            reply = read_reply(received[message.metadata.message_id])
        if isinstance(reply, Failed | Declined):
            LOG.warning("round %d: %s failed: %s", self.epoch + 1, client, why_declined(reply))
        return reply

    def _send(self, messages: list[Message], timeout: float | None) -> dict[str, Message]:
        """Replies by the message that they answer: the error of a dead node carries a wrong sender."""
        if not messages:
            return {}
        replies = self.grid.send_and_receive(messages, timeout=timeout)
        return {reply.metadata.reply_to_message_id: reply for reply in replies}

    def _meet(self, seconds: float) -> None:
        """Ask nodes that are new for their names, and forget those that are gone."""
        alive = set(self.grid.get_node_ids())
        self.nodes = {client: node for client, node in self.nodes.items() if node in alive}
        new = sorted(alive.difference(self.nodes.values(), self._strangers))
        messages = [hello_message(node, seconds) for node in new]
        received = self._send(messages, seconds)
        said: dict[int, str] = {}
        for message in messages:
            reply = received.get(message.metadata.message_id)
            name = None if reply is None or reply.has_error() else read_hello(reply)
            if name is not None:
                said[message.metadata.dst_node_id] = name
        shared = Counter(said.values())
        for node, name in said.items():
            if name not in self.clients or name in self.nodes or shared[name] > 1:
                why = "there is no such client" if name not in self.clients else "another node says the same"
                LOG.error("node %d says that it is %.80r, but %s; it is left out", node, name, why)
                self._strangers.add(node)
            else:
                self.nodes[name] = node


def _once(models: dict[int, ArrayRecord], request: Request) -> ArrayRecord:
    """The model of a request, made into a record once for all who get it."""
    assert not isinstance(request, Ask)
    key = id(request.broadcast)
    if key not in models:
        models[key] = model_record(request.broadcast)
    return models[key]
