"""The server's side of the transport: nodes of clients, requests to them, and their replies."""

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
    """Sends requests to the nodes of clients and returns their replies. It asks new nodes which client they are.

    clients: the names. run: of the run. timeout: seconds to wait for the replies to a set of requests; None: no limit.
    """

    grid: Grid
    clients: Sequence[str]
    run: str
    timeout: float | None = None
    epoch: int = 0
    after_client: Callable[[], None] = lambda: None
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    nodes: dict[str, int] = field(default_factory=dict)
    _rejected: set[int] = field(default_factory=set)
    _turn: int = 0

    def gather(self, seconds: float) -> None:
        """Wait up to `seconds` until every client has a node; an error if none has."""
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
            LOG.warning("%s has no node; continuing without it", client)

    def begin_epoch(self, epoch: int) -> None:
        """Start a new epoch, after the server has stored its state."""
        self.epoch, self._turn = epoch, 0

    def exchange(self, requests: Mapping[str, Request]) -> dict[str, Outcome]:
        """Send every request to its client's node. Returns the replies by client, sorted by name."""
        self._meet(HELLO_SECONDS if self.timeout is None else self.timeout)
        place = Place(self.run, self.session, self.epoch, self._turn)
        self._turn += 1
        models: dict[int, ArrayRecord] = {}
        sent: dict[str, Message] = {}
        for client, request in sorted(requests.items()):
            if client in self.nodes:
                model = None if isinstance(request, Ask) else _model_record_once(models, request)
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
        """Replies by the id of the message that they answer: the error of a dead node names a wrong sender."""
        if not messages:
            return {}
        replies = self.grid.send_and_receive(messages, timeout=timeout)
        return {reply.metadata.reply_to_message_id: reply for reply in replies}

    def _meet(self, seconds: float) -> None:
        """Ask new nodes for the names of their clients, and remove nodes that are gone."""
        alive = set(self.grid.get_node_ids())
        self.nodes = {client: node for client, node in self.nodes.items() if node in alive}
        new = sorted(alive.difference(self.nodes.values(), self._rejected))
        messages = [hello_message(node, seconds) for node in new]
        received = self._send(messages, seconds)
        claimed: dict[int, str] = {}
        for message in messages:
            reply = received.get(message.metadata.message_id)
            name = None if reply is None or reply.has_error() else read_hello(reply)
            if name is not None:
                claimed[message.metadata.dst_node_id] = name
        shared = Counter(claimed.values())
        for node, name in claimed.items():
            if name not in self.clients or name in self.nodes or shared[name] > 1:
                why = "there is no such client" if name not in self.clients else "another node has the same name"
                LOG.error("node %d claims to be client %.80r, but %s; it is ignored", node, name, why)
                self._rejected.add(node)
            else:
                self.nodes[name] = node


def _model_record_once(models: dict[int, ArrayRecord], request: Request) -> ArrayRecord:
    """The model of a request as a record, which is made once for all clients that get it."""
    assert not isinstance(request, Ask)
    key = id(request.broadcast)
    if key not in models:
        models[key] = model_record(request.broadcast)
    return models[key]
