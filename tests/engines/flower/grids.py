"""A grid without a network: nodes answer at once, in this process, and may be made to misbehave."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

import leaktight.engines.flower  # noqa: F401  # switches Flower's telemetry off before Flower is imported

from flwr.app import Context, Error, Message, RecordDict, UserConfig  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip
from flwr.serverapp import Grid  # isort: skip
from flwr.supercore.task_identity import TaskIdentity  # isort: skip

Change = Callable[[Message, Message], Message | None]
"""What becomes of a reply (second) to a message (first); None: it never arrives, and Flower says: the node is gone."""


def take_identity() -> None:
    """Be a task of a run, as Flower demands of whoever makes a message."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


class LocalGrid(Grid):
    """Runs a ClientApp for every node in turn; replies come in a random order."""

    def __init__(
        self, app: ClientApp, nodes: dict[int, UserConfig], change: Change = lambda sent, reply: reply
    ) -> None:
        take_identity()
        self.app, self.change = app, change
        self.contexts = {node: Context(1, node, dict(said), RecordDict(), {}) for node, said in nodes.items()}
        self.sent: list[Message] = []
        self.waiting: dict[str, Message] = {}
        self.order = random.Random(0)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            ids.append(message.metadata.message_id)
            self.sent.append(message)
            reply = self.change(message, self._answer(message))
            self.waiting[message.metadata.message_id] = reply or Message(Error(5, "gone"), reply_to=message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.waiting.pop(each) for each in message_ids if each in self.waiting]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = list(self.pull_messages(self.push_messages(messages)))
        self.order.shuffle(replies)
        return replies

    def _answer(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:  # as Flower does it
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)


def nodes(count: int, **settings: Any) -> dict[int, UserConfig]:
    """Nodes whose numbers say nothing about their places."""
    return {1000 - 7 * place: {"partition-id": place, **settings} for place in range(count)}


class StallingGrid(LocalGrid):
    """A grid whose transport is that of Flower: a reply is announced, and then pulled until all of it is there.

    stalls: whether a node announces a reply to this message and never sends it: the pull blocks for `blocked` seconds.
    late: seconds after which the other replies are announced.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: dict[int, UserConfig],
        stalls: Callable[[Message], bool],
        *,
        blocked: float = 3.0,
        late: float = 0.4,
    ) -> None:
        super().__init__(app, nodes)
        self.stalls, self.blocked, self.late = stalls, blocked, late
        self.stalled: set[str] = set()
        self.pushed_at: dict[str, float] = {}
        self.lock = threading.Lock()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        ids = list(super().push_messages(sent))
        for message, each in zip(sent, ids, strict=True):
            self.pushed_at[each] = time.monotonic()
            if self.stalls(message):
                self.stalled.add(each)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = list(message_ids)
        with self.lock:
            late = [each for each in asked if time.monotonic() > self.pushed_at[each] + self.late]
            ready = list(super().pull_messages([each for each in late if each not in self.stalled]))
            blocks = self.stalled.intersection(asked)
            self.stalled -= blocks
        if blocks:
            time.sleep(self.blocked)
        return ready

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        waiting, replies = set(self.push_messages(messages)), []
        end = time.monotonic() + (600 if timeout is None else timeout)
        while waiting and time.monotonic() < end:
            found = list(self.pull_messages(waiting))
            replies += found
            waiting -= {each.metadata.reply_to_message_id for each in found}
            time.sleep(0.1)
        return replies
