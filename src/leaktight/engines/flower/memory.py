"""The memory of a node: the client's private state and its replies in a run.

It is in Flower's context, which lasts as long as Flower's run, and in a file, which survives a restart of the node and
of the server. No reply is computed twice: a restarted server repeats the requests of its unfinished round and gets the
same bytes. Any other request for an answered round is refused, because two replies would reveal what noise hides.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import filelock
import torch
from flwr.app import ConfigRecord, RecordDict

from leaktight.core.errors import CheckpointError, RefusedError
from leaktight.core.files import write_private
from leaktight.core.keys import KEY_BYTES
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import State
from leaktight.engines.flower.messages import Envelope

VERSION = 3

_RUN = "leaktight.run"


@dataclass(frozen=True)
class Memory:
    """What a client knows of a run.

    run: the name of the run. brings: a hash of the client's data and settings. key: the root of its secrets.
    answers: the number of all replies. epoch: of the last one. now: the client's state after it, as stored.
    sent: the hash of the request and the bytes of the reply, by turn of this epoch.
    """

    run: str
    brings: str
    key: bytes = field(repr=False)
    answers: int = 0
    epoch: int = 0
    now: State | None = field(default=None, repr=False)
    sent: Mapping[str, State] = field(default_factory=dict, repr=False)

    def sent_to(self, asked: Envelope) -> bytes | None:
        """The stored reply to this request, or None if it is new. Raises `RefusedError` if it must not be answered."""
        place = asked.place
        if place.epoch < self.epoch:
            raise RefusedError(f"asked for round {place.epoch + 1} again, after round {self.epoch + 1}")
        if place.epoch > self.epoch:
            return None
        entry = self.sent.get(str(place.turn))
        if entry is None:
            if any(int(turn) > place.turn for turn in self.sent):
                raise RefusedError(f"request {place.turn} of round {place.epoch + 1} arrived after a later one")
            return None
        if entry["digest"] != asked.digest:
            raise RefusedError(f"another request of round {place.epoch + 1} was answered already")
        reply: bytes = entry["reply"].numpy().tobytes()
        return reply

    def after(self, asked: Envelope, reply: bytes, state: State) -> Memory:
        """The memory after the reply to this request. Replies of earlier epochs are dropped."""
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
class MemoryStore:
    """Stores the memory of a client: in a file for each run, if there is a folder, and in Flower's context.

    single: the client takes part in one run only, the first whose request it answers.
    """

    client: str
    context: RecordDict
    folder: Path | None
    single: bool

    def recall(self, run: str, brings: str) -> Memory:
        """The memory of the run; for a new run it is empty, with a new key."""
        self._require_free(run)
        memory = self._load(run) or Memory(run, brings, secrets.token_bytes(KEY_BYTES))
        if memory.brings != brings:
            raise CheckpointError(
                f"expected the data and the settings that {self._where(run)} was made with, got others, which could "
                "get the same noise; restore them, or start a new run"
            )
        return memory

    def remember(self, memory: Memory) -> None:
        """Store the memory before its last reply is sent; an error if another reply was stored meanwhile.

        The file is written first: a crash then loses at most a reply that was never sent.
        """
        data = pack({"version": VERSION, **vars(memory)})
        with self._locked():
            self._require_free(memory.run)
            held = self._load(memory.run)
            if memory.answers != (0 if held is None else held.answers) + 1:
                raise RefusedError("another request was answered at the same time; this answer was not sent")
            if self.single:
                self._claim(memory.run)
            if (path := self._state_path(memory.run)) is not None:
                write_private(path, data)
            self.context[_key(memory.run)] = ConfigRecord({"memory": data})

    def _require_free(self, run: str) -> None:
        if not self.single or self._claimed_run() in (None, run.encode()):
            return
        advice = "" if self._claim_path is None else f"; remove {self._claim_path} to allow another, with a new budget"
        raise RefusedError(f"expected the one run that {self.client} takes part in, got {run!r:.40}{advice}")

    def _claimed_run(self) -> object:
        """The name of the run that the client takes part in, or None."""
        if self._claim_path is not None:
            return self._claim_path.read_bytes() if self._claim_path.exists() else None
        records = self.context.config_records
        return records[_RUN]["run"] if _RUN in records else None

    def _claim(self, run: str) -> None:
        if self._claim_path is not None:
            write_private(self._claim_path, run)
        else:
            self.context[_RUN] = ConfigRecord({"run": run.encode()})

    def _load(self, run: str) -> Memory | None:
        path = self._state_path(run)
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
    def _claim_path(self) -> Path | None:
        """The file with the name of the run that the client takes part in."""
        return None if self.folder is None else self.folder / f"{self.client}.run"

    def _state_path(self, run: str) -> Path | None:
        """The file of a run and client. The server chooses the name of the run, so it is hashed, not used as a path."""
        return None if self.folder is None else self.folder / f"{self.client}-{_short(run)}.state"

    def _where(self, run: str) -> str:
        return str(self._state_path(run) or "the state in Flower's context")

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
        content = dict(unpack(data))
        version = content.pop("version")
        if version != VERSION:
            raise CheckpointError(f"{where} has version {version}, expected {VERSION}; start a new run")
        return Memory(**content)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"the private state in {where} cannot be read; restore it, or start a new run") from error
