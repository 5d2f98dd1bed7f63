"""The result files of an audit as values: what `summary.json` and `trials.jsonl` hold, checked when they are read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1
UNDEFENDED = "none"
VARIES = "varies"
"""A fact of the ledger that is not the same in all trials."""


class _Record(BaseModel):
    """Fields that a later version adds are ignored; fields that are missing or of a wrong type are errors."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Threat(_Record):
    """Who the attacker is: what the server does, what it sees, what it knows beside."""

    server: str = "curious"
    sees: str = "client"
    knows: tuple[str, ...] = ()


class Score(_Record):
    """A metric over the trials of a cell. `worst` is the most leaking trial."""

    mean: float | None = None
    ci95: tuple[float | None, float | None] | None = None
    worst: float | None = None


class _Scored(_Record):
    """A record whose metrics lie beside its other fields; they are gathered in `scores`, whatever their names."""

    scores: dict[str, Score] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, content: Any) -> Any:
        if not isinstance(content, dict) or "scores" in content:
            return content
        scores = {name: value for name, value in content.items() if isinstance(value, dict) and "mean" in value}
        return {**content, "scores": scores}


class Cell(_Scored):
    """One attack on one defense, over all its trials.

    control: what a guess without the update scores, by metric. first_loss, loss: where the attack's own search began
    and ended, for a single trial whose originals nobody knows.
    """

    attack: str
    defense: str
    role: Literal["attack", "control"] = "attack"
    adaptive: bool = False
    threat: Threat = Threat()
    trials: int
    failed: int = 0
    success_rate: float | None = None
    control: dict[str, float | None] = Field(default_factory=dict)
    first_loss: float | None = None
    loss: float | None = None
    seconds: float | None = None
    flags: tuple[str, ...] = ()
    trial_ids: tuple[str, ...] = ()

    @property
    def done(self) -> int:
        """Trials with a result."""
        return max(self.trials - self.failed, 0)

    @property
    def leaked(self) -> int | None:
        """Trials that count as leaked."""
        return None if self.success_rate is None else round(self.success_rate * self.done)


class Verdict(_Record):
    """What was concluded about a defense against an attacker."""

    defense: str
    threat: Threat = Threat()
    verdict: str
    because: str = ""
    worst_attack: str | None = None
    trial_id: str | None = None


class Flag(_Record):
    """A reason to doubt a figure."""

    code: str
    cell: dict[str, Any] | None = None
    raised_if: str = ""
    advice: str = ""
    detail: str = ""


class Leak(_Record):
    """The leakage of a defense in a trade-off: its worst attack's figure."""

    metric: str = "ssim"
    worst: float | None = None
    attack: str | None = None
    psnr: float | None = None


class TradeoffRow(_Record):
    """A defense's leakage, accuracy and cost."""

    defense: str
    settings: dict[str, Any] = Field(default_factory=dict)
    leak: Leak = Leak()
    accuracy: float | None = None
    seconds_per_round: float | None = None
    cost_share: float | None = None
    on_front: bool = False


class Recommendation(_Record):
    """Which defense the trade-off speaks for, and why."""

    defense: str | None = None
    because: str = ""


class Tradeoff(_Record):
    """All defenses of a trade-off."""

    rows: tuple[TradeoffRow, ...] = ()
    recommendation: Recommendation | None = None


class Moment(_Scored):
    """The leakage of one client's update in one round."""

    defense: str
    attack: str
    adaptive: bool = False
    round: int
    accuracy: float | None = None
    trials: int | None = None


class Pictures(_Record):
    """Two PNG strips of `count` images of `size` (height, width), side by side: originals and reconstructions.

    truth: None where nobody knows the originals, as with a captured update.
    """

    truth: str | None = None
    guess: str
    size: tuple[int, int] | None = None
    count: int | None = None


class Trial(_Record):
    """One line of `trials.jsonl`."""

    id: str
    attack: str
    defense: str
    role: Literal["attack", "control"] = "attack"
    adaptive: bool = False
    threat: Threat = Threat()
    trial: int = 0
    round: int = 0
    client: str = ""
    seed: int | str | None = None
    status: Literal["done", "failed"] = "done"
    error: str | None = None
    ledger: dict[str, Any] = Field(default_factory=dict)
    scores: dict[str, list[float | None] | None] = Field(default_factory=dict)
    label_accuracy: float | None = None
    loss: float | None = None
    first_loss: float | None = None
    update_changed: bool | None = None
    seconds: float | None = None
    images: Pictures | None = None

    def score(self, metric: str) -> float | None:
        """The mean of a metric over the trial's examples."""
        return mean(self.scores.get(metric) or ())


class Summary(_Record):
    """`summary.json`."""

    schema_version: int
    run: str = ""
    command: str | None = None
    truth_given: bool = True
    scenario: dict[str, Any] = Field(default_factory=dict)
    cells: tuple[Cell, ...]
    verdicts: tuple[Verdict, ...] = ()
    flags: tuple[Flag, ...] = ()
    leaked_if: str = ""
    ledger: dict[str, Any] = Field(default_factory=dict)
    training_failed: dict[str, str] = Field(default_factory=dict)
    tradeoff: Tradeoff | None = None
    over_time: tuple[Moment, ...] | None = None


def mean(values: Iterable[float | None]) -> float | None:
    """
    >>> mean([1.0, None, 3.0])
    2.0
    """
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) / len(known) if known else None
