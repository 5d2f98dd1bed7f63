"""Trials gathered into cells, one for each attack on each defense, and what counts as a leak.

**A trial leaks** if one of its examples does. An example leaks if its guess is close to it, and much closer than the
best guess of the negative controls for the same example, which know everything but the update:
SSIM of at least 0.6 and at least 0.2 above the controls', or PSNR of at least 20 dB and at least 6 dB above theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from leaktight.audit.statistics import Interval, bootstrap
from leaktight.core.rng import Rng
from leaktight.metrics import METRICS

Line = Mapping[str, Any]
"""A line of `trials.jsonl`."""

THRESHOLDS: Mapping[str, tuple[float, float]] = {"ssim": (0.6, 0.2), "psnr": (20.0, 6.0)}
"""By metric: the least score of a leaked example, and how far above the controls it has to be."""

LEAKED_IF = (
    "if one of its examples has SSIM of at least {:g} and at least {:g} above the best guess without the update, "
    "or PSNR of at least {:g} dB and at least {:g} dB above it"
).format(*THRESHOLDS["ssim"], *THRESHOLDS["psnr"])
"""What counts as a leak, in words for readers of the results."""

Victim = tuple[str, int, int]
"""Whose example: the defense, the trial, the round."""


@dataclass(frozen=True)
class Cell:
    """One attack on one defense, over all its trials. controls: by victim the best scores without the update."""

    lines: Sequence[Line]
    controls: Mapping[Victim, Mapping[str, Sequence[float | None]]]
    rng: Rng

    @property
    def attack(self) -> str:
        return str(self.lines[0]["attack"])

    @property
    def defense(self) -> str:
        return str(self.lines[0]["defense"])

    @property
    def role(self) -> str:
        return str(self.lines[0]["role"])

    @property
    def adaptive(self) -> bool:
        return bool(self.lines[0]["adaptive"])

    @property
    def threat(self) -> Mapping[str, Any]:
        threat: Mapping[str, Any] = self.lines[0]["threat"]
        return threat

    @cached_property
    def done(self) -> list[Line]:
        return [line for line in self.lines if line["status"] == "done"]

    @cached_property
    def leaked(self) -> list[Line]:
        return [line for line in self.done if leaks(line, self.controls.get(victim_of(line), {}))]

    @property
    def success_rate(self) -> float | None:
        """The share of finished trials that leaked."""
        return len(self.leaked) / len(self.done) if self.done else None

    def values(self, metric: str) -> dict[str, float]:
        """By the id of each finished trial, the mean of a metric over its examples."""
        found = {line["id"]: score_of(line, metric) for line in self.done}
        return {name: value for name, value in found.items() if value is not None}

    def interval(self, metric: str) -> Interval | None:
        return self._mean(list(self.values(metric).values()), metric)

    def gain(self, metric: str) -> Interval | None:
        """By how much the attack is better than the best control on the same victims."""
        gains = []
        for line in self.done:
            own = score_of(line, metric)
            best = mean(self.controls.get(victim_of(line), {}).get(metric, ()))
            if own is not None and best is not None:
                gains.append(own - best if METRICS[metric].leaks_when == "high" else best - own)
        return self._mean(gains, f"gain of {metric}")

    def label_accuracy(self) -> Interval | None:
        known = [line["label_accuracy"] for line in self.done if line["label_accuracy"] is not None]
        return self._mean(known, "label_accuracy")

    def most_leaking(self, metric: str = "ssim") -> str | None:
        """The id of the trial with the score nearest to the truth."""
        values = self.values(metric)
        sign = 1 if METRICS[metric].leaks_when == "high" else -1
        return max(values, key=lambda name: sign * values[name]) if values else None

    def control(self, metric: str) -> float | None:
        """The mean over the cell's victims of the best score without the update."""
        return mean([mean(self.controls.get(victim_of(line), {}).get(metric, ())) for line in self.done])

    def _mean(self, values: Sequence[float], name: str) -> Interval | None:
        return bootstrap(values, rng=self.rng.child(name)) if values else None


def gather(lines: Sequence[Line], seed: int) -> list[Cell]:
    """The cells of these trials, in the order of their first ones."""
    controls = best_controls(lines)
    groups: dict[tuple[str, str, bool], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["defense"], line["attack"], line["adaptive"]), []).append(line)
    root = Rng(seed).child("bootstrap")
    return [
        Cell(group, controls, root.child(defense, attack, int(adaptive)))
        for (defense, attack, adaptive), group in groups.items()
    ]


def best_controls(lines: Sequence[Line]) -> dict[Victim, dict[str, list[float | None]]]:
    """By victim and metric, the best score of any control for each example."""
    found: dict[Victim, dict[str, list[float | None]]] = {}
    for line in lines:
        if line["role"] != "control" or line["status"] != "done":
            continue
        best = found.setdefault(victim_of(line), {})
        for metric, scores in line["scores"].items():
            if scores is not None:
                before = best.get(metric, [None] * len(scores))
                best[metric] = [_better(metric, *pair) for pair in zip(before, scores, strict=True)]
    return found


def leaks(line: Line, controls: Mapping[str, Sequence[float | None]]) -> bool:
    """Whether one of the trial's examples leaked, as the head of this file defines it."""
    for metric, (least, margin) in THRESHOLDS.items():
        scores = line["scores"].get(metric) or []
        others = controls.get(metric) or [None] * len(scores)
        for score, control in zip(scores, others, strict=True):
            if score is not None and score >= least and (control is None or score >= control + margin):
                return True
    return False


def victim_of(line: Line) -> Victim:
    return line["defense"], line["trial"], line["round"]


def score_of(line: Line, metric: str) -> float | None:
    """A trial's score: the mean over its examples."""
    return mean(line["scores"].get(metric) or ())


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _better(metric: str, one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other) if METRICS[metric].leaks_when == "high" else min(one, other)
