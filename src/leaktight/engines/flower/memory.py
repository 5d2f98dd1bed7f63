"""What a node remembers of a run: the client's private state and what it has answered.

It is kept in Flower's context, which lives as long as Flower's run, and in a file, which also survives a restart of the
node and of the server. Nothing is ever computed a second time: a server that was restarted asks again what it had asked
in the round that it had not finished, and gets the same bytes. Any other request for what was answered is refused:
whoever could compare two answers would learn what noise is to hide.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import filelock
import torch
from flwr.app import ConfigRecord, RecordDict

from leaktight.core.errors import CheckpointError, RefusedError
from leaktight.core.files import write_private
from leaktight.core.secret import KEY_BYTES
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import State
from leaktight.engines.flower.messages import Envelope

VERSION = 3

_RUN = "leaktight.run"


@dataclass(frozen=True)
class Memory:
    """now: the client's state after the last answer, as it is stored. key: the root of its own secrets.

    brings: a hash of the data and the settings that belong to the state. answers: how many there were in all.
    sent: by turn of this epoch, the hash of what was asked and the bytes of the reply.
    """

    run: str
    brings: str
    key: bytes = field(repr=False)
    answers: int = 0
    epoch: int = 0
    now: State | None = field(default=None, repr=False)
    sent: Mapping[str, State] = field(default_factory=dict, repr=False)

    def sent_to(self, asked: Envelope) -> bytes | None:
        """The reply to this very request; None: it is new; `RefusedError`: it must not be answered."""
        place = asked.place
        if place.epoch < self.epoch:
            raise RefusedError(f"asked for round {place.epoch + 1} again, after round {self.epoch + 1}")
        if place.epoch > self.epoch:
            return None
        entry = self.sent.get(str(place.turn))
        if entry is None:
            if any(int(turn) > place.turn for turn in self.sent):
                raise RefusedError(f"request {place.turn} of round {place.epoch + 1} comes after a later one")
            return None
        if entry["digest"] != asked.digest:
            raise RefusedError(f"round {place.epoch + 1} was answered already, to another request")
        reply: bytes = entry["reply"].numpy().tobytes()
        return reply

    def after(self, asked: Envelope, reply: bytes, state: State) -> Memory:
        """The memory once this request is answered. Replies of earlier epochs are dropped."""
        place = asked.place
        entry = {"digest": asked.digest, "reply": torch.frombuffer(bytearray(reply), dtype=torch.uint8)}
        before = self.sent if place.epoch == self.epoch else {}
        return replace(
            self,
            answers=self.answers + 1,
            epoch=place.epoch,
            now=state,
            sent={**before, str(place.turn): entry},
        )


@dataclass(frozen=True)
class Keeper:
    """Where the memory of a client is kept: a file for each run, if there is a folder, and Flower's context.

    single: the client takes part in one run only, the first of which it answers a request.
    """

    client: str
    context: RecordDict
    folder: Path | None
    single: bool

    def recall(self, run: str, brings: str) -> Memory:
        """What is known of the run; of a new one, nothing but a new key."""
        self._require_free(run)
        memory = self._held(run) or Memory(run, brings, secrets.token_bytes(KEY_BYTES))
        if memory.brings != brings:
            raise CheckpointError(
                f"expected the data and the settings that {self._where(run)} was made with, got others, which could "
                "meet the same noise; restore them, or start a new run"
            )
        return memory

    def remember(self, memory: Memory) -> None:
        """Keep the memory before its last reply is sent; of two that follow the same one, only the first.

        The file comes first: what is lost then is at most an answer that was never sent.
        """
        data = pack({"version": VERSION, **vars(memory)})
        with self._locked():
            self._require_free(memory.run)
            held = self._held(memory.run)
            if memory.answers != (0 if held is None else held.answers) + 1:
                raise RefusedError("another request was answered at the same time; this answer was not sent")
            if self.single:
                self._claim(memory.run)
            if (path := self._state(memory.run)) is not None:
                write_private(path, data)
            self.context[_key(memory.run)] = ConfigRecord({"memory": data})

    def _require_free(self, run: str) -> None:
        if not self.single or self._claim_held() in (None, run.encode()):
            return
        advice = (
            "" if self._claimed is None else f"; remove {self._claimed} to let another in, with a budget of its own"
        )
        raise RefusedError(f"expected the one run that {self.client} takes part in, got {run!r:.40}{advice}")

    def _claim_held(self) -> object:
        """The name of the run that the client takes part in, or None."""
        if self._claimed is not None:
            return self._claimed.read_bytes() if self._claimed.exists() else None
        records = self.context.config_records
        return records[_RUN]["run"] if _RUN in records else None

    def _claim(self, run: str) -> None:
        if self._claimed is not None:
            write_private(self._claimed, run)
        else:
            self.context[_RUN] = ConfigRecord({"run": run.encode()})

    def _held(self, run: str) -> Memory | None:
        path = self._state(run)
        if path is not None and path.exists():
            memory = _read(path.read_bytes(), str(path))
        elif (key := _key(run)) in self.context.config_records:
            data = self.context.config_records[key]["memory"]
            memory = _read(data if isinstance(data, bytes) else b"", "Flower's context")
        else:
            return None
        if memory.run != run:
            raise CheckpointError(f"expected the state of run {run!r:.40}, got that of {memory.run!r:.40}")
        return memory

    @property
    def _claimed(self) -> Path | None:
        """The file that says which run the client takes part in."""
        return None if self.folder is None else self.folder / f"{self.client}.run"

    def _state(self, run: str) -> Path | None:
        """One file per run and client. The run's name comes from the server, so it never becomes a path itself."""
        return None if self.folder is None else self.folder / f"{self.client}-{_short(run)}.state"

    def _where(self, run: str) -> str:
        return str(self._state(run) or "the state in Flower's context")

    def _locked(self) -> AbstractContextManager[object]:
        if self.folder is None:
            return nullcontext()
        self.folder.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(self.folder / f"{self.client}.lock", mode=0o600)


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
