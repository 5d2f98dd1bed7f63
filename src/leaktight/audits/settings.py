"""The settings of an audit: the `[audit]` table of a config."""

from __future__ import annotations

from dataclasses import dataclass

from leaktight.core.errors import suggestion
from leaktight.metrics import METRICS

NEEDED_METRICS = ("psnr", "mse", "ssim")
"""What verdicts rest on; computed whatever a config asks for."""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """How often, when and whom an audit attacks.

    trials: victims for each attack on each defense; the same victims for all of them.
    attack_round: the round that is attacked, counted from 0, or several.
    every: attack the same clients in rounds 0, every, 2 every ... instead: leakage over time.
    targets: names of the clients to attack, in turn; empty: one drawn at random for each trial.
    metrics: names of scores (`leaktight list metrics`) beside psnr, mse, ssim and label_accuracy.
    adapted: kinds of attacks that are also tried by somebody who knows the defense; all where none of these is tried.
    """

    trials: int = 5
    attack_round: int | tuple[int, ...] = 0
    every: int | None = None
    targets: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("lpips_alex",)
    adapted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"expected trials >= 1, got {self.trials}")
        rounds = (self.attack_round,) if isinstance(self.attack_round, int) else self.attack_round
        if not rounds or any(each < 0 for each in rounds) or len(set(rounds)) != len(rounds):
            raise ValueError(f"expected attack_round >= 0, or several that differ, got {self.attack_round}")
        if self.every is not None and self.every < 1:
            raise ValueError(f"expected every >= 1, got {self.every}")
        if self.every is not None and self.attack_round != 0:
            raise ValueError("expected either attack_round or every, got both; leave one out")
        for name in self.metrics:
            if name not in METRICS:
                raise ValueError(f"expected the name of a metric, got {name!r}; {suggestion(name, METRICS)}")

    def rounds(self, played: int) -> tuple[int, ...]:
        """The attacked rounds of a federation that plays so many.

        >>> AuditSettings(every=4).rounds(10)
        (0, 4, 8)
        """
        if self.every is not None:
            return tuple(range(0, played, self.every))
        return (self.attack_round,) if isinstance(self.attack_round, int) else tuple(sorted(self.attack_round))

    @property
    def image_metrics(self) -> tuple[str, ...]:
        """The scores of images, those that verdicts rest on first."""
        return tuple(
            name for name in dict.fromkeys((*NEEDED_METRICS, *self.metrics)) if METRICS[name].judges == "images"
        )
