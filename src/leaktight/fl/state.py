"""The state of a client between requests, which never leaves the client, and checkpoints of state on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from leaktight.core.checksum import with_checksum, without_checksum
from leaktight.core.errors import CheckpointError
from leaktight.core.files import write_private
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import Params, State

BEFORE_ROUNDS = -1


@dataclass(frozen=True)
class Conduct:
    """The requests that a client has answered.

    round, scored: the rounds of the last model that it trained and of the last that it scored, or BEFORE_ROUNDS.
    rounds: how many it has trained in. asked: the round in which each kind of question was last answered.
    """

    round: int = BEFORE_ROUNDS
    rounds: int = 0
    scored: int = BEFORE_ROUNDS
    asked: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientState:
    """The state of a client.

    defense, aggregator, guard: the state of each, including the spent privacy budget.
    params, buffers: the tensors that the defense withholds from the server.
    """

    defense: State = field(default_factory=dict)
    aggregator: State = field(default_factory=dict)
    params: Params = field(default_factory=dict)
    buffers: Params = field(default_factory=dict)
    conduct: Conduct = Conduct()
    guard: State = field(default_factory=dict)

    def with_spent(self, later: ClientState) -> ClientState:
        """This state with what the client has spent since, up to `later`: going back gives no budget back.

        The defense's memory is that of `later`, and so is the number of rounds. Where the client stands in the
        protocol, what it withholds, and what guard and aggregator remember, goes back.
        """
        return replace(self, defense=later.defense, conduct=replace(self.conduct, rounds=later.conduct.rounds))

    def stored(self) -> dict[str, Any]:
        """The state as nested mappings for `core.tensors.pack`, as written to disk."""
        return {**vars(self), "conduct": vars(self.conduct)}

    @classmethod
    def restored(cls, stored: State) -> ClientState:
        """The inverse of `stored`."""
        return cls(**{**stored, "conduct": Conduct(**stored["conduct"])})


VERSION = 4


def save_checkpoint(path: Path, state: State) -> None:
    """Replace `path` by nested state (see `core.tensors.pack`); only the owner can read it, as it may hold secrets."""
    write_private(path, with_checksum(pack({"version": VERSION, "state": state})))


def load_checkpoint(path: Path, *, remedy: str = "start a new run") -> dict[str, Any]:
    """Read what `save_checkpoint` wrote; `CheckpointError` if it is missing or damaged. remedy: for its message."""
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; {remedy}") from error
    content = unpack(without_checksum(stored, str(path), remedy=remedy))
    if content["version"] != VERSION:
        raise CheckpointError(f"{path} has version {content['version']}, expected {VERSION}; start a new run")
    state: dict[str, Any] = content["state"]
    return state
