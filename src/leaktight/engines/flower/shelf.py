"""Where a mod keeps what its node remembers: a private file if there is a folder for it, and Flower's context."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message

from leaktight.core.errors import CheckpointError
from leaktight.core.files import write_private
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import State

LOG = logging.getLogger("leaktight.flower")

_RAISED = 2  # flwr.common.constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION


def refusal(message: Message) -> Message:
    """The answer to a message that gets none: the server learns no reason."""
    return Message(Error(_RAISED, "the client could not answer; its own log says why"), reply_to=message)


class Shelf:
    """The private state of one mod at one node.

    state_dir: where the file is, which outlives the node's process; without it, `state-dir` of the node's config;
    without that, the context alone, which lives as long as the run.
    """

    def __init__(self, name: str, context: Context, state_dir: Path | str | None) -> None:
        folder = state_dir or context.node_config.get("state-dir")
        self.owner = str(context.node_config.get("partition-id", "node"))
        self.key, self.context = f"leaktight.{name}", context.state
        self.path = Path(str(folder)) / f"{name}-{self.owner}.state" if folder else None

    def read(self) -> dict[str, Any] | None:
        data: object = None
        if self.path is not None and self.path.exists():
            data = self.path.read_bytes()
        elif self.key in self.context.config_records:
            data = self.context.config_records[self.key]["state"]
        if data is None:
            return None
        try:
            return unpack(data if isinstance(data, bytes) else b"")
        except Exception as error:
            raise CheckpointError(f"the private state at {self.path or self.key} cannot be read") from error

    def write(self, state: State) -> None:
        data = pack(state)
        if self.path is not None:
            write_private(self.path, data)
        self.context[self.key] = ConfigRecord({"state": data})
