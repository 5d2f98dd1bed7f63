"""The settings of a client's local training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from leaktight.core.errors import require_above, require_at_least
from leaktight.core.text import as_written


@runtime_checkable
class Schedule(Protocol):
    """The learning rate of a round as a share of the initial one."""

    def factor(self, round_index: int, num_rounds: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same learning rate in every round."""

    def factor(self, round_index: int, num_rounds: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Half a cosine from the initial learning rate towards `final` times it, over all rounds.

    final: the last factor.

    >>> [round(Cosine().factor(r, 4), 3) for r in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.final <= 1:
            raise ValueError(f"expected final in [0, 1], got {self.final}")

    def factor(self, round_index: int, num_rounds: int) -> float:
        wave = 0.5 * (1 + math.cos(math.pi * round_index / max(num_rounds, 1)))
        return self.final + (1 - self.final) * wave


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Multiply by `gamma` when a share of all rounds has passed, once for each of `milestones`.

    milestones: shares of all rounds, in (0, 1). gamma: the factor.

    >>> [round(Steps(milestones=(0.5,)).factor(r, 4), 3) for r in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """

    milestones: tuple[float, ...] = (1 / 3, 2 / 3)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"expected gamma > 0, got {self.gamma}")
        if any(not 0 <= share <= 1 for share in self.milestones):
            raise ValueError(f"expected milestones in [0, 1] (shares of all rounds), got {as_written(self.milestones)}")

    def factor(self, round_index: int, num_rounds: int) -> float:
        passed = sum(round_index >= share * num_rounds for share in self.milestones)
        return self.gamma**passed


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a client trains. `epochs` passes over `samples` of its examples, or exactly `steps` steps if given.

    epochs: passes over the client's examples of the round.
    steps: number of local steps instead of epochs; the examples are repeated as often as needed.
    samples: the number of examples that a client uses in a round; None: all.
    redraw: draw these examples again every round; otherwise a client draws them once and keeps them.
    batch_size: examples per step. A last incomplete batch is used, unless `drop_last`.
    optimizer: "sgd" (with momentum, nesterov, weight_decay) or "adam"; its state is reset every round.
    schedule: of the learning rate over the rounds.
    """

    epochs: int = 1
    steps: int | None = None
    samples: int | None = None
    redraw: bool = field(default=True, repr=False)
    batch_size: int = 32
    drop_last: bool = False
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    schedule: Schedule = Constant()

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "samples", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        require_above(0, learning_rate=self.learning_rate)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"expected momentum in [0, 1), got {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum > 0; set momentum or leave nesterov out")
        require_at_least(0, weight_decay=self.weight_decay)
        if self.samples is not None and self.batch_size > self.samples:
            raise ValueError(
                f"expected batch_size <= samples, got batch_size {self.batch_size} > samples {self.samples}"
            )

    def num_steps(self, num_examples: int) -> int:
        """The number of local steps per round of a client with `num_examples` examples.

        >>> LocalTraining(epochs=2, batch_size=4).num_steps(10)
        6
        """
        if self.steps is not None:
            return self.steps
        return self.epochs * self.steps_per_epoch(num_examples)

    def steps_per_epoch(self, num_examples: int) -> int:
        used = num_examples if self.samples is None else min(self.samples, num_examples)
        whole, rest = divmod(used, self.batch_size)
        return whole if self.drop_last or not rest else whole + 1
