"""Messages to nodes, and their replies. Each reply is pulled by itself, so that one that stalls holds up no other."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from leaktight.fl.messages import Failed

FIRST_WAIT, LONGEST_WAIT = 0.1, 2.0
"""Seconds between two looks for replies; they double from the first to the longest."""
PATIENCE = 1.0
"""Seconds after which a pull counts as slow: it goes on, and others start beside it."""
WIDTH = 8
"""Pulls that run beside each other before one of them is slow."""
GRACE = 5.0
"""Seconds after a timeout for the replies that are being pulled, and for one more look."""


@dataclass
class Post:
    """Sends messages and pulls the replies. Flower's own pull of several replies blocks until all of them are there."""

    grid: Grid
    waiting: set[str] = field(default_factory=set)
    _pulls: dict[str, _Pull] = field(default_factory=dict)

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages; afterwards `metadata.message_id` is set."""
        if messages:
            sent = set(self.grid.push_messages(messages))
            self.waiting |= {message.metadata.message_id for message in messages} & sent

    def collect(self, seconds: float | None) -> dict[str, Message | Failed]:
        """The replies that arrive within `seconds`, by the id of the message; None: wait for all.

        After the timeout there is one more look, since a reply may have arrived after the last one.
        """
        end = math.inf if seconds is None else time.monotonic() + seconds
        replies: dict[str, Message | Failed] = {}
        pause = FIRST_WAIT
        while self.waiting and time.monotonic() < end:
            found = self.arrived()
            replies |= found
            pause = FIRST_WAIT if found else min(2 * pause, LONGEST_WAIT)
            if self.waiting:
                time.sleep(max(0.0, min(pause, end - time.monotonic())))
        if self.waiting:
            replies |= self.arrived(GRACE)
        return replies

    def arrived(self, seconds: float = PATIENCE) -> dict[str, Message | Failed]:
        """Look once for every reply that is waited for. seconds: how long a look may take; slow ones go on."""
        for name in sorted(self.waiting.difference(self._pulls)):
            self._pulls[name] = _Pull(self.grid, name)
            self._make_room()
        end = time.monotonic() + seconds
        found: dict[str, Message | Failed] = {}
        for name, pull in list(self._pulls.items()):
            pull.join(max(0.0, min(end, pull.began + seconds) - time.monotonic()))
            if pull.is_alive():
                continue
            del self._pulls[name]
            if pull.reply is not None and name in self.waiting:
                found[name] = pull.reply
                self.waiting.remove(name)
        return found

    def forget(self, names: set[str]) -> None:
        """Wait no more for the replies to these messages."""
        self.waiting -= names

    def _make_room(self) -> None:
        """Wait while many pulls run that are not slow yet."""
        while True:
            young = [pull for pull in self._pulls.values() if pull.is_alive() and pull.age < PATIENCE]
            if len(young) < WIDTH:
                return
            young[0].join(max(0.0, PATIENCE - young[0].age))


class _Pull(threading.Thread):
    """The pull of one reply. A daemon: Flower's pull can block for minutes, and must not keep the process alive."""

    def __init__(self, grid: Grid, name: str) -> None:
        super().__init__(daemon=True)
        self.grid, self.message_id = grid, name
        self.reply: Message | Failed | None = None
        self.began = time.monotonic()
        self.start()

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> None:
        try:
            for reply in self.grid.pull_messages([self.message_id]):
                if reply.metadata.reply_to_message_id == self.message_id:
                    self.reply = reply
        except Exception as error:  # of a reply that Flower cannot read: it must not end the run
            self.reply = Failed(f"the answer cannot be read ({type(error).__name__})")
