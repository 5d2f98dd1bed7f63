"""The memory of a node: the client's private state and its replies in a run.

It is in Flower's context, which lasts as long as Flower's run, and in a file, which survives a restart of the node and
of the server. No reply is computed twice: a server that was restarted, or that went back to an earlier round, repeats
its requests and gets the same bytes. Another request in the place of an answered one would reveal what noise hides. It
is refused, unless the client allows some rounds to be repeated; then the noise is new and the budget goes on.
"""

from __future__ import annotations

import hashlib
import secrets
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import filelock
import torch
from flwr.app import ConfigRecord, RecordDict

from leaktight.core.checksum import with_checksum, without_checksum
from leaktight.core.errors import CheckpointError, RefusedError
from leaktight.core.files import make_private_folder, remove_partial, write_private
from leaktight.core.keys import KEY_BYTES
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import State
from leaktight.engines.flower.messages import Envelope

VERSION = 4

_RUN = "leaktight.run"
_REMEDY = "restore it, or start a new run"


@dataclass(frozen=True)
class Entry:
    """An answered request. epoch, turn: its place. digest: its hash. after: the client's state after it, as stored."""

    epoch: int
    turn: int
    digest: str
    reply: bytes = field(repr=False)
    after: State = field(repr=False)

    @property
    def spot(self) -> tuple[int, int]:
        return self.epoch, self.turn

    def stored(self) -> State:
        return {**vars(self), "reply": torch.frombuffer(bytearray(self.reply), dtype=torch.uint8)}

    @classmethod
    def restored(cls, stored: State) -> Entry:
        return cls(**{**stored, "reply": stored["reply"].numpy().tobytes()})


@dataclass(frozen=True)
class Memory:
    """What a client knows of a run.

    run: the name of the run. brings: a hash of the client's data and settings. key: the root of its secrets.
    answers: the number of all replies. log: the requests of the last epochs, in order. base: the client's state before
    them, as stored. returns: how often the client went back to answer a request anew. repeats: in how many rounds it
    did. reached: the last epoch that was answered when it went back. counted: the last epoch in `repeats` since then.
    """

    run: str
    brings: str
    key: bytes = field(repr=False)
    answers: int = 0
    base: State | None = field(default=None, repr=False)
    log: tuple[Entry, ...] = ()
    returns: int = 0
    repeats: int = 0
    reached: int = -1
    counted: int = -1

    @property
    def now(self) -> State | None:
        """The client's state after the last reply, as stored."""
        return self.log[-1].after if self.log else self.base

    def sent_to(self, asked: Envelope) -> bytes | None:
        """The stored reply to exactly this request, or None."""
        place = asked.place
        same = (each for each in self.log if each.spot == (place.epoch, place.turn) and each.digest == asked.digest)
        return next((each.reply for each in same), None)

    def ready_for(self, asked: Envelope, most: int) -> Memory:
        """The memory with which a request is answered that has no reply: this one, or one that went back.

        most: the number of rounds that the client repeats. Raises `RefusedError` if the request must not be answered.
        """
        spot, memory = (asked.place.epoch, asked.place.turn), self
        if self.log and spot <= self.log[-1].spot:
            if self.base is not None and spot < self.log[0].spot:
                raise RefusedError(f"{self._again(asked)}, which is not kept any more")
            memory = replace(
                self,
                log=tuple(each for each in self.log if each.spot < spot),
                returns=self.returns + 1,
                reached=max(self.reached, self.log[-1].epoch),
                counted=-1,
            )
        epoch = asked.place.epoch
        if epoch > memory.reached or epoch == memory.counted:
            return memory
        if self.repeats >= most:
            raise RefusedError(f"{self._again(asked)}; {self.repeats} of {most} rounds (max_repeats) were repeated")
        return replace(memory, repeats=self.repeats + 1, counted=epoch)

    def _again(self, asked: Envelope) -> str:
        """Why a request is not simply the next one."""
        place, last = asked.place, self.log[-1].epoch
        if place.epoch != last:
            return f"asked for round {place.epoch + 1} again, after round {max(last, self.reached) + 1}"
        if any(each.spot == (place.epoch, place.turn) for each in self.log):
            return f"another request of round {place.epoch + 1} was answered already"
        return f"request {place.turn} of round {place.epoch + 1} arrived after a later one"

    def after(self, asked: Envelope, reply: bytes, state: State, *, keep: int) -> Memory:
        """The memory after the reply to this request. keep: how many epochs it has replies of."""
        place = asked.place
        log = (*self.log, Entry(place.epoch, place.turn, asked.digest, reply, state))
        old = [each for each in log if each.epoch <= place.epoch - keep]
        return replace(self, answers=self.answers + 1, base=old[-1].after if old else self.base, log=log[len(old) :])

    def stored(self) -> State:
        return {"version": VERSION, **vars(self), "log": [each.stored() for each in self.log]}

    @classmethod
    def restored(cls, stored: State) -> Memory:
        return cls(**{**stored, "log": tuple(Entry.restored(each) for each in stored["log"])})


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
        data = with_checksum(pack(memory.stored()))
        with self._locked():
            self._require_free(memory.run)
            held = self._load(memory.run)
            if memory.answers != (0 if held is None else held.answers) + 1:
                raise RefusedError("another request was answered at the same time; this answer was not sent")
            if self.single:
                self._claim(memory.run)
            if (path := self._state_path(memory.run)) is not None:
                remove_partial(path.parent, {path.name, f"{self.client}.run"})
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
        make_private_folder(self.folder)
        return filelock.FileLock(self.folder / f"{self.client}.lock", mode=0o600)


def _key(run: str) -> str:
    return f"leaktight.{_short(run)}"


def _short(run: str) -> str:
    return hashlib.sha256(run.encode()).hexdigest()[:16]


def _read(data: bytes, where: str) -> Memory:
    content = dict(unpack(without_checksum(data, where, remedy=_REMEDY)))
    version = content.pop("version")
    if version != VERSION:
        raise CheckpointError(f"{where} has version {version}, expected {VERSION}; start a new run")
    return Memory.restored(content)
