"""Bounds on the pulls of a grid that talks to a SuperLink, so that no reply fills the server's memory or a thread."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.superlink.grid.http_grid import HttpGrid

from leaktight.fl.limits import Limits

LOG = logging.getLogger("leaktight.flower")

OBJECT_BYTES = 32 * 2**20
"""The largest part of a reply. Flower cuts arrays into parts of 5 MiB, and may be set to larger ones."""
CHUNK_BYTES = 2**20
"""The smallest mean size of a part of an array, by which the number of parts is limited."""
MORE_PARTS = 64
"""Parts of a reply that are no parts of an array."""
PULL_SECONDS = 600.0
"""The longest time that a part may be announced and not be there."""


def bounded(grid: Grid, limits: Limits, seconds: float | None) -> Grid:
    """Have a grid of a SuperLink refuse replies beyond the limits while it pulls them. Other grids stay as they are.

    seconds: the longest time for a part of a reply that was announced; None: ten minutes.
    """
    if isinstance(grid, HttpGrid):
        client: Any = grid._runtime_client
        client._client.event_hooks["response"].append(refuse_large)
        grid._client = BoundedClient(client, limits.most_bytes, PULL_SECONDS if seconds is None else seconds)  # type: ignore[assignment]
    return grid


class _Part(NamedTuple):
    """A part of a reply. reply: the id of the whole. since: when it was announced."""

    reply: str
    since: float


@dataclass
class BoundedClient:
    """The client of Flower's Runtime API, with bounds on what is pulled."""

    client: Any
    most_bytes: int
    seconds: float
    _refused: set[str] = field(default_factory=set)
    _announced: dict[str, _Part] = field(default_factory=dict)
    _pulled: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.client, name)
        return method

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        answer: PullAppMessagesResponse = self.client.PullMessages(request)
        for tree in answer.message_object_trees:
            most = MORE_PARTS + self.most_bytes // CHUNK_BYTES
            for count, part in enumerate(_parts(tree)):
                if count >= most:
                    self._refused.add(tree.object_id)
                    LOG.warning("a reply of more than %d parts is refused", most)
                    del tree.children[:]
                    break
                self._announced[part] = _Part(tree.object_id, time.monotonic())
        return answer

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        name = request.object_id
        part = self._announced.get(name, _Part(name, 0.0))
        if part.reply in self._refused:
            raise ObjectPullError(name, "the reply is too large")
        answer: PullObjectResponse = self.client.PullObject(request)
        if not answer.object_available and time.monotonic() > part.since + self.seconds:
            raise ObjectPullError(name, f"it was announced, and not there within {self.seconds:g} s")
        self._pulled[part.reply] += len(answer.object_content)
        if self._pulled[part.reply] > self.most_bytes + OBJECT_BYTES:
            self._refused.add(part.reply)
            LOG.warning("a reply of more than %d bytes is refused", self.most_bytes)
            raise ObjectPullError(name, "the reply is too large")
        return answer


def _parts(tree: ObjectTree) -> Iterator[str]:
    """The ids of all objects of a tree, without recursion: its depth is the sender's choice."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node.object_id
        waiting.extend(node.children)


def refuse_large(response: httpx.Response) -> None:
    """Called when the head of an HTTP response is there, before its body is read."""
    if response.url.path.endswith("/pull-object") and int(response.headers.get("content-length", 0)) > OBJECT_BYTES:
        raise ObjectPullError(str(response.url.path), f"a part of the reply has more than {OBJECT_BYTES} bytes")
