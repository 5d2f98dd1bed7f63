"""The settings of an audit: the `[audit]` table of a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leaktight.audits.judge.statistics import victims_needed
from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.text import as_written
from leaktight.metrics import metric_spec

NEEDED_METRICS = ("psnr", "mse", "ssim")
"""Metrics that verdicts need; always computed."""
MOST_VICTIMS = 10_000
FIRST_LOOK, SECOND_LOOK = 5, 20
"""Victims at the two looks of `trials = "auto"`; the second has more where `confidence` needs them."""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """Whom an audit attacks, when, and how often.

    trials: victims for each attack on each defense, at least 1; "auto": 5, and 20 or more where 5 do not decide.
    confidence: the share of victims that "nothing found" has to stay below, between 0 and 1.
    attack_round: the attacked round, counted from 0, or several.
    every: attack the same clients in rounds 0, every, 2 * every ... instead of attack_round.
    targets: names of the clients to attack, in turn; if empty, a random client for each trial.
    metrics: metrics in addition to psnr, mse, ssim and label_accuracy: `leaktight list metrics`, or
    "package.module:name".
    adapted: kinds of attacks that are also tried with knowledge of the defense; all attacks if none of these is tried.
    watched: the rounds in which the victim is watched, from the attacked one on; at least 1.
    watched_examples: the victim trains on the "same" examples in all of them, and an attack that joins rounds makes one
    guess from all updates, any other from the last; or on "new" ones, and every round is attacked, with those before it
    as what is known of the client.
    """

    trials: int | Literal["auto"] = "auto"
    confidence: float = 0.15
    attack_round: int | tuple[int, ...] = 0
    every: int | None = None
    targets: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("lpips_alex",)
    adapted: tuple[str, ...] = ()
    watched: int = 1
    watched_examples: Literal["same", "new"] = "same"

    def __post_init__(self) -> None:
        if isinstance(self.trials, bool) or not (self.trials == "auto" or isinstance(self.trials, int)):
            raise ValueError(f"expected trials to be an integer or 'auto', got {as_written(self.trials)}")
        if isinstance(self.confidence, bool) or not isinstance(self.confidence, int | float):
            raise ValueError(f"expected confidence to be a number > 0 and < 1, got {as_written(self.confidence)}")
        require_at_least(1, trials=None if self.trials == "auto" else self.trials, every=self.every)
        require_at_least(1, watched=self.watched)
        if not 0 < self.confidence < 1:
            raise ValueError(f"expected confidence > 0 and < 1, got {self.confidence}")
        if self.looks[-1] > MOST_VICTIMS:
            raise ValueError(
                f"expected at most {MOST_VICTIMS} victims, got {self.looks[-1]}; lower trials, or raise confidence "
                f"({self.confidence})"
            )
        rounds = (self.attack_round,) if isinstance(self.attack_round, int) else self.attack_round
        if not rounds or any(each < 0 for each in rounds) or len(set(rounds)) != len(rounds):
            raise ValueError(f"expected attack_round >= 0, or several distinct rounds, got {self.attack_round}")
        if self.every is not None and self.attack_round != 0:
            raise ValueError("expected either attack_round or every, got both; leave one out")
        try:
            for name in self.metrics:
                metric_spec(name)
        except UsageError as error:
            raise ValueError(f"metrics: {error}") from error

    @property
    def looks(self) -> tuple[int, ...]:
        """The number of victims at each look at the results.

        >>> AuditSettings(trials=3).looks, AuditSettings().looks, AuditSettings(confidence=0.05).looks
        ((3,), (5, 20), (5, 59))
        """
        if self.trials != "auto":
            return (self.trials,)
        return FIRST_LOOK, max(SECOND_LOOK, victims_needed(self.confidence))

    def rounds(self, played: int) -> tuple[int, ...]:
        """The attacked rounds of a federation of `played` rounds.

        >>> AuditSettings(every=4).rounds(10)
        (0, 4, 8)
        """
        if self.every is not None:
            return tuple(range(0, played, self.every))
        return (self.attack_round,) if isinstance(self.attack_round, int) else tuple(sorted(self.attack_round))

    @property
    def image_metrics(self) -> tuple[str, ...]:
        """The metrics of images, those that verdicts need first."""
        return tuple(
            name for name in dict.fromkeys((*NEEDED_METRICS, *self.metrics)) if metric_spec(name).judges == "images"
        )
