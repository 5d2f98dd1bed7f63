"""Trials grouped into cells, one for each attack on each defense, and what counts as a leak.

**A trial leaks** if one of its examples does. An example leaks if its guess is close to it, and much closer than the
best guess of the negative controls, which know everything but the update: SSIM of at least 0.6 and at least 0.2 above
the controls', or PSNR of at least 20 dB and at least 6 dB above theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from leaktight.core.rng import Rng
from leaktight.results.schema import Role, Threat, Trial, mean

THRESHOLDS: Mapping[str, tuple[float, float]] = {"ssim": (0.6, 0.2), "psnr": (20.0, 6.0)}
"""By metric: the lowest score of a leaked example, and its smallest distance above the controls."""

LEAKED_IF = (
    "if one of its examples has SSIM of at least {:g} and at least {:g} above the best guess without the update, "
    "or PSNR of at least {:g} dB and at least {:g} dB above it"
).format(*THRESHOLDS["ssim"], *THRESHOLDS["psnr"])
"""The definition of a leaked trial, as results print it."""

CONFIDENCE = 0.95
RESAMPLES = 2000

Victim = tuple[str, int, int]
"""Which client's update: the defense, the trial, the round."""


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class CellTrials:
    """The trials of one attack on one defense. controls: each example's best control score, by victim and metric."""

    trials: Sequence[Trial]
    controls: Mapping[Victim, Mapping[str, Sequence[float | None]]]
    rng: Rng

    @property
    def attack(self) -> str:
        return self.trials[0].attack

    @property
    def defense(self) -> str:
        return self.trials[0].defense

    @property
    def role(self) -> Role:
        return self.trials[0].role

    @property
    def adaptive(self) -> bool:
        return self.trials[0].adaptive

    @property
    def threat(self) -> Threat:
        return self.trials[0].threat

    @cached_property
    def done(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "done"]

    @cached_property
    def leaked(self) -> list[Trial]:
        return [trial for trial in self.done if leaks(trial, self._controls(trial))]

    @property
    def success_rate(self) -> float | None:
        """The share of finished trials that leaked."""
        return len(self.leaked) / len(self.done) if self.done else None

    def values(self, metric: str) -> dict[str, float]:
        """By the id of each finished trial, the mean of a metric over its examples."""
        found = {trial.id: trial.score(metric) for trial in self.done}
        return {name: value for name, value in found.items() if value is not None}

    def interval(self, metric: str) -> Interval | None:
        return self._mean(list(self.values(metric).values()), metric)

    def gain(self, metric: str) -> Interval | None:
        """The mean difference to the best control on the same victims; above 0 the attack is better."""
        gains = []
        for trial in self.done:
            own = trial.score(metric)
            best = mean(self._controls(trial).get(metric, ()))
            if own is not None and best is not None:
                gains.append(own - best if trial.leaks_when(metric) == "high" else best - own)
        return self._mean(gains, f"gain of {metric}")

    def label_accuracy(self) -> Interval | None:
        return self._mean(self.labels_read, "label_accuracy")

    @property
    def labels_read(self) -> list[float]:
        """The label accuracy of each trial whose attack was not given the labels."""
        return [trial.label_accuracy for trial in self.done if trial.label_accuracy is not None]

    def most_leaking(self, metric: str = "ssim") -> str | None:
        """The id of the finished trial whose score leaks most."""
        values = self.values(metric)
        if not values:
            return None
        most = max if self.done[0].leaks_when(metric) == "high" else min
        return most(values, key=lambda name: values[name])

    def control(self, metric: str) -> float | None:
        """The mean over the cell's victims of the best control score."""
        return mean([mean(self._controls(trial).get(metric, ())) for trial in self.done])

    def _controls(self, trial: Trial) -> Mapping[str, Sequence[float | None]]:
        return self.controls.get(victim_of(trial), {})

    def _mean(self, values: Sequence[float], name: str) -> Interval | None:
        return bootstrap(values, rng=self.rng.child(name)) if values else None


def gather(trials: Sequence[Trial], seed: int) -> list[CellTrials]:
    """The cells of these trials, in the order of their first trials."""
    controls = best_controls(trials)
    groups: dict[tuple[str, str, bool], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.defense, trial.attack, trial.adaptive), []).append(trial)
    root = Rng(seed).child("bootstrap")
    return [
        CellTrials(group, controls, root.child(defense, attack, int(adaptive)))
        for (defense, attack, adaptive), group in groups.items()
    ]


def best_controls(trials: Sequence[Trial]) -> dict[Victim, dict[str, list[float | None]]]:
    """By victim and metric, the best score of any control for each example."""
    found: dict[Victim, dict[str, list[float | None]]] = {}
    for trial in trials:
        if trial.role != "control" or trial.status != "done":
            continue
        best = found.setdefault(victim_of(trial), {})
        for metric, scores in trial.scores.items():
            if scores is not None:
                before = best.get(metric, [None] * len(scores))
                better = max if trial.leaks_when(metric) == "high" else min
                best[metric] = [
                    better((each for each in pair if each is not None), default=None)
                    for pair in zip(before, scores, strict=True)
                ]
    return found


def leaks(trial: Trial, controls: Mapping[str, Sequence[float | None]]) -> bool:
    """Whether one of the trial's examples leaked, as this module defines it."""
    for metric, (least, margin) in THRESHOLDS.items():
        scores = trial.scores.get(metric) or ()
        others = controls.get(metric) or [None] * len(scores)
        for score, control in zip(scores, others, strict=True):
            if score is not None and score >= least and (control is None or score >= control + margin):
                return True
    return False


def victim_of(trial: Trial) -> Victim:
    return trial.defense, trial.trial, trial.round


def bootstrap(values: Sequence[float], *, rng: Rng) -> Interval:
    """The mean and the percentile interval of 2000 resamples of the values; one value gives an interval of width 0.

    Reference: Efron, Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.
    """
    data = np.asarray(values, dtype=np.float64)
    places = rng.public_numpy().integers(0, len(data), (RESAMPLES, len(data)))
    low, high = np.quantile(data[places].mean(1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(data.mean()), float(low), float(high))


def upper_bound(successes: int, trials: int) -> float:
    """The upper 95 % confidence bound of a success rate (Clopper and Pearson, one-sided).

    >>> round(upper_bound(0, 5), 2), round(upper_bound(0, 59), 2), upper_bound(3, 3)
    (0.45, 0.05, 1.0)
    """
    from scipy.special import betaincinv  # slow to import

    return 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, CONFIDENCE))
