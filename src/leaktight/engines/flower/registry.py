"""Which node is which client: nodes are asked for their names and prove them with their keys."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from leaktight.core.text import printable
from leaktight.engines.flower.keybook import KeyBook
from leaktight.engines.flower.messages import hello_message, read_hello
from leaktight.engines.flower.post import FIRST_WAIT, LONGEST_WAIT, Post
from leaktight.fl.messages import Failed

LOG = logging.getLogger("leaktight.flower")

HELLO_SECONDS = 120.0
"""How long a node has to say who it is; the start of its process is part of that."""
NONCE_BYTES = 32


class _Greeting(NamedTuple):
    """A question to a node. until: when it is no longer waited for."""

    node: int
    nonce: bytes
    until: float


class _Claim(NamedTuple):
    """A name that a node has proven to sign for with this key. again: whether it may be asked once more."""

    client: str
    key: bytes
    again: bool = False


@dataclass
class Registry:
    """The nodes of clients. A node that does not answer holds up nobody; its late answer still counts.

    clients: the names. keys: those by which clients are known. nodes: the number of each client's node.
    """

    grid: Grid
    clients: Sequence[str]
    keys: KeyBook
    nodes: dict[str, int] = field(default_factory=dict)
    _post: Post = field(init=False)
    _greeted: dict[str, _Greeting] = field(default_factory=dict)
    _claims: dict[int, _Claim] = field(default_factory=dict)
    _refused: dict[int, _Claim] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._post = Post(self.grid)

    def meet(self, wanted: Collection[str], seconds: float) -> None:
        """Greet new nodes, and wait up to `seconds` while a wanted client has none and a node may still be it."""
        self._greet(set(self.grid.get_node_ids()))
        end, pause = time.monotonic() + seconds, FIRST_WAIT
        while self._greeted:
            self._read()
            now = time.monotonic()
            proven = (claim for claim in self._claims.values() if self.keys.why_not(claim.client, claim.key) is None)
            named = {*self.nodes, *(claim.client for claim in proven)}
            open_ones = any(each.until > now for each in self._greeted.values())
            if now >= end or not open_ones or named.issuperset(wanted):
                break
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT)
        self._admit()

    def _greet(self, alive: set[int]) -> None:
        """Forget nodes that are gone, and ask those that are new, or whose name has become free."""
        self.nodes = {client: node for client, node in self.nodes.items() if node in alive}
        gone = {name for name, greeting in self._greeted.items() if greeting.node not in alive}
        self._post.forget(gone)
        self._greeted = {name: each for name, each in self._greeted.items() if name not in gone}
        self._refused = {node: claim for node, claim in self._refused.items() if node in alive and not self._free(node)}
        known = {*self.nodes.values(), *self._refused, *(each.node for each in self._greeted.values())}
        fresh = sorted(alive - known)
        nonces = [secrets.token_bytes(NONCE_BYTES) for _ in fresh]
        messages = [hello_message(node, nonce, HELLO_SECONDS) for node, nonce in zip(fresh, nonces, strict=True)]
        self._post.send(messages)
        until = time.monotonic() + HELLO_SECONDS
        for message, node, nonce in zip(messages, fresh, nonces, strict=True):
            self._greeted[message.metadata.message_id] = _Greeting(node, nonce, until)

    def _free(self, node: int) -> bool:
        """Whether the name that a refused node wanted has no other claimant any more."""
        claim = self._refused[node]
        others = [each.client for other, each in self._refused.items() if other != node and each.again]
        return claim.again and claim.client not in self.nodes and claim.client not in others

    def _read(self) -> None:
        """Take the answers that have arrived; an answer without proof is none, and the node is asked again."""
        for name, reply in self._post.arrived().items():
            greeting = self._greeted.pop(name)
            if isinstance(reply, Failed) or reply.has_error():
                continue
            self._claim(greeting, reply)

    def _claim(self, greeting: _Greeting, reply: Message) -> None:
        hello = read_hello(reply, greeting.nonce, greeting.node)
        if hello is None:
            LOG.error("node %d does not prove who it is; it is ignored", greeting.node)
            self._refused[greeting.node] = _Claim("", b"")
        else:
            self._claims[greeting.node] = _Claim(*hello)

    def _admit(self) -> None:
        """Give names to the nodes that may have them."""
        claims, self._claims = self._claims, {}
        for node, claim in sorted(claims.items()):
            reason, again = self._why_not(node, claim, claims)
            if reason is None:
                self.keys.pin(claim.client, claim.key)
                self.nodes[claim.client] = node
                continue
            LOG.error(
                "node %d claims to be client %r, but %s; it is ignored", node, printable(claim.client, 80), reason
            )
            self._refused[node] = claim._replace(again=again)

    def _why_not(self, node: int, claim: _Claim, claims: dict[int, _Claim]) -> tuple[str | None, bool]:
        """Why a node does not get the name, and whether it may be asked again when nobody else wants it."""
        if claim.client not in self.clients:
            return "there is no such client", False
        if (reason := self.keys.why_not(claim.client, claim.key)) is not None:
            return reason, False
        rivals = [
            other
            for other, each in claims.items()
            if other != node and each.client == claim.client and self.keys.why_not(*each[:2]) is None
        ]
        return ("another node has the same name", True) if rivals or claim.client in self.nodes else (None, False)
