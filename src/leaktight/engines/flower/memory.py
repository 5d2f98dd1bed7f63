"""What a node remembers of one run: the client's private state, in Flower's context and in a file of its own.

The context lives as long as the run; the file also survives a restart of the node and of the server. A server that was
restarted plays again the round that it had not finished, and the client answers again from the state before that round.
It does so only if it is asked exactly the same: whoever asks for another model in a round that was answered already
could compare two answers under the same noise.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from leaktight.core.errors import CheckpointError, RefusedError
from leaktight.core.files import write_private
from leaktight.core.secret import KEY_BYTES
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import State
from leaktight.engines.flower.messages import Envelope, Place

VERSION = 2


@dataclass(frozen=True)
class Memory:
    """before, now: the client's state before the first request of the epoch, and after the last one answered.

    key: the root of the client's own secrets. answered: by turn of this epoch, what was asked and in which session.
    """

    run: str
    key: bytes
    session: str = ""
    epoch: int = 0
    before: State | None = None
    now: State | None = None
    answered: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def enter(self, asked: Envelope) -> Memory:
        """The memory to answer from, or an error where the request must not be answered."""
        place = asked.place
        if place.epoch < self.epoch:
            raise RefusedError(f"asked for round {place.epoch + 1} again, after round {self.epoch + 1}")
        if place.epoch > self.epoch:
            return replace(self, session=place.session, epoch=place.epoch, before=self.now, answered={})
        # A restarted server asks all over again, in the same order; only then does it get to what it had not asked.
        open_turns = [int(turn) for turn, mark in self.answered.items() if mark["session"] != place.session]
        if open_turns:
            again = place.turn == min(open_turns) and self.answered[str(place.turn)]["digest"] == asked.digest
        else:
            again = str(place.turn) not in self.answered
        if not again:
            raise RefusedError(f"round {place.epoch + 1} was answered already, to another request")
        return self if place.session == self.session else replace(self, session=place.session, now=self.before)

    def after(self, asked: Envelope, state: State) -> Memory:
        mark = {"digest": asked.digest, "session": asked.place.session}
        return replace(self, now=state, answered={**self.answered, str(asked.place.turn): mark})


def recall(place: Place, client: str, context: RecordDict, folder: Path | None) -> Memory:
    """What is known of the run: from the file if there is one, else from the context, else nothing."""
    path = memory_path(folder, place.run, client)
    if path is not None and path.exists():
        memory = _read(path.read_bytes(), str(path))
    elif (key := _key(place.run)) in context.config_records:
        data = context.config_records[key]["memory"]
        memory = _read(data if isinstance(data, bytes) else b"", "Flower's context")
    else:
        return Memory(place.run, secrets.token_bytes(KEY_BYTES))
    if memory.run != place.run:
        raise CheckpointError(f"expected the state of run {place.run!r:.40}, got that of {memory.run!r:.40}")
    return memory


def remember(memory: Memory, client: str, context: RecordDict, folder: Path | None) -> None:
    """Keep the memory, in the file first: what is lost then is at most an answer that was never sent."""
    data = pack({"version": VERSION, **vars(memory)})
    path = memory_path(folder, memory.run, client)
    if path is not None:
        write_private(path, data)
    context[_key(memory.run)] = ConfigRecord({"memory": data})


def memory_path(folder: Path | None, run: str, client: str) -> Path | None:
    """One file per run and client. The run's name comes from the server, so it never becomes a path itself."""
    if folder is None:
        return None
    return folder / f"{client}-{_short(run)}.state"


def _key(run: str) -> str:
    return f"leaktight.{_short(run)}"


def _short(run: str) -> str:
    return hashlib.sha256(run.encode()).hexdigest()[:16]


def _read(data: bytes, where: str) -> Memory:
    try:
        content: dict[str, Any] = unpack(data)
        version = content.pop("version")
        if version != VERSION:
            raise CheckpointError(f"{where} has version {version}, expected {VERSION}; start a new run")
        return Memory(**content)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"the private state in {where} cannot be read; restore it, or start a new run") from error
