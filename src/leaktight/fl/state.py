"""The state of a client between requests. It never leaves the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

    def stored(self) -> dict[str, Any]:
        """The state as nested mappings for `core.tensors.pack`, as written to disk."""
        return {**vars(self), "conduct": vars(self.conduct)}

    @classmethod
    def restored(cls, stored: State) -> ClientState:
        """The inverse of `stored`."""
        return cls(**{**stored, "conduct": Conduct(**stored["conduct"])})
