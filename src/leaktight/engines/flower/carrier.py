"""The server's side of the transport: requests to the nodes of clients, and their replies."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from leaktight.core.errors import LeaktightError
from leaktight.engines.flower.keybook import KeyBook
from leaktight.engines.flower.messages import Place, Proof, model_record, read_reply, request_message
from leaktight.engines.flower.post import GRACE, Post
from leaktight.engines.flower.registry import HELLO_SECONDS, Registry
from leaktight.fl.limits import Limits
from leaktight.fl.messages import Ask, Declined, Failed, Outcome, Request, why_declined

LOG = logging.getLogger("leaktight.flower")

POLL_SECONDS = 0.5
JOIN_STEP = 5.0
"""The longest time in which no new node is looked for at the start."""


@dataclass
class GridCarrier:
    """Sends requests to the nodes of clients and returns their replies.

    clients: the names. run: of the run. timeout: seconds to wait for the replies to a set of requests; None: no limit.
    limits: of what a client may send. keys: by which clients are known.
    """

    grid: Grid
    clients: Sequence[str]
    run: str
    timeout: float | None = None
    epoch: int = 0
    after_client: Callable[[], None] = lambda: None
    limits: Limits = Limits()
    keys: KeyBook = field(default_factory=KeyBook)
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    _registry: Registry = field(init=False)
    _turn: int = 0

    def __post_init__(self) -> None:
        self._registry = Registry(self.grid, self.clients, self.keys)

    @property
    def nodes(self) -> Mapping[str, int]:
        """The number of each client's node."""
        return self._registry.nodes

    def gather(self, seconds: float) -> None:
        """Wait up to `seconds` until every client has a node; an error if none has."""
        end = time.monotonic() + seconds
        while True:
            self._registry.meet(self.clients, max(1.0, min(JOIN_STEP, end - time.monotonic())))
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
        self._registry.meet(requests, HELLO_SECONDS if self.timeout is None else min(self.timeout, HELLO_SECONDS))
        place = Place(self.run, self.session, self.epoch, self._turn)
        self._turn += 1
        lifetime = None if self.timeout is None else self.timeout + GRACE  # valid until the last look for its reply
        models: dict[int, ArrayRecord] = {}
        sent: dict[str, Message] = {}
        for client, request in sorted(requests.items()):
            if client in self.nodes:
                model = None if isinstance(request, Ask) else _model_record_once(models, request)
                sent[client] = request_message(request, model, place, self.nodes[client], lifetime)
        post = Post(self.grid)
        post.send(list(sent.values()))
        received = post.collect(self.timeout)
        replies: dict[str, Outcome] = {}
        for client in sorted(requests):
            replies[client] = self._reply(client, sent.get(client), place, received)
            self.after_client()
        return replies

    def _reply(
        self, client: str, message: Message | None, place: Place, received: Mapping[str, Message | Failed]
    ) -> Outcome:
        arrived = None if message is None else received.get(message.metadata.message_id)
        if message is None:
            reply: Outcome = Failed("it has no node")
        elif arrived is None:
            reply = Failed("no answer" if self.timeout is None else f"no answer within {self.timeout:g} s")
        elif isinstance(arrived, Failed):
            reply = arrived
        else:
            proof = Proof(place, client, self.keys.key_of(client) or b"")
            reply = read_reply(arrived, self.limits, proof=proof)
        if isinstance(reply, Failed | Declined):
            LOG.warning("round %d: %s failed: %s", self.epoch + 1, client, why_declined(reply))
        return reply


def _model_record_once(models: dict[int, ArrayRecord], request: Request) -> ArrayRecord:
    """The model of a request as a record, which is made once for all clients that get it."""
    assert not isinstance(request, Ask)
    key = id(request.broadcast)
    if key not in models:
        models[key] = model_record(request.broadcast)
    return models[key]
