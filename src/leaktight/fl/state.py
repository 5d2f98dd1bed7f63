"""What a client remembers between requests. It never leaves the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from leaktight.core.types import Params, State

BEFORE_ROUNDS = -1


@dataclass(frozen=True)
class Conduct:
    """What a client has answered so far; at first nothing.

    round, scored: of the last model that it trained on or scored. rounds: how many it trained in.
    asked: the round in which each kind of question was last answered.
    """

    round: int = BEFORE_ROUNDS
    rounds: int = 0
    scored: int = BEFORE_ROUNDS
    asked: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientState:
    """All that a client remembers.

    defense, aggregator, guard: the own memory of each, what was spent of a privacy budget among it.
    params, buffers: what the defense withholds from the server.
    """

    defense: State = field(default_factory=dict)
    aggregator: State = field(default_factory=dict)
    params: Params = field(default_factory=dict)
    buffers: Params = field(default_factory=dict)
    conduct: Conduct = Conduct()
    guard: State = field(default_factory=dict)

    def stored(self) -> dict[str, Any]:
        """The state as `core.tensors.pack` takes it: what is written to disk."""
        return {**vars(self), "conduct": vars(self.conduct)}

    @classmethod
    def restored(cls, stored: State) -> ClientState:
        """The inverse of `stored`."""
        return cls(**{**stored, "conduct": Conduct(**stored["conduct"])})
