"""Trials grouped into cells, one for each attack on each defense in a track, and what counts as a reconstruction.

**A trial reconstructs its victim** if one of its examples is. An example is reconstructed if its guess is close to it,
much closer than the best guess of the negative controls, which know everything but the update, and closer to it than to
every decoy: SSIM of at least 0.6 and at least 0.2 above the controls', or PSNR of at least 20 dB and at least 6 dB
above theirs. It is exact if PSNR is at least 30 dB and 10 dB above that of every control and decoy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from leaktight.audits.judge.statistics import Interval, fisher, interval
from leaktight.report.words import defense_words
from leaktight.results.schema import Fault, Role, Threat, Track, Trial, faults_of, mean

THRESHOLDS: Mapping[str, tuple[float, float]] = {"ssim": (0.6, 0.2), "psnr": (20.0, 6.0)}
"""By metric: the lowest score of a reconstructed example, and its smallest distance above the controls."""
EXACT = (30.0, 10.0)
"""PSNR of an exact example, and its smallest distance above the controls and decoys."""
RANGES: Mapping[str, tuple[float, float]] = {
    "ssim": (-0.1, 1.0),
    "psnr": (0.0, 100.0),
    "mse": (0.0, 1.0),
    "label_accuracy": (0.0, 1.0),
}
"""The range of a victim's mean score. SSIM can be as low as -1, but guesses do not get there; see `interval`."""

LEAKED_IF = (
    "if for one of its examples SSIM is at least {:g} and at least {:g} above the best guess without the update, "
    "or PSNR at least {:g} dB and at least {:g} dB above it, and no decoy is as close to the guess"
).format(*THRESHOLDS["ssim"], *THRESHOLDS["psnr"])
"""The definition of a reconstruction, as results print it."""

Place = tuple[Track, str, int, int, str | None]
"""Which client's update: the track, the defense, the trial, the round, and the digest of its examples."""


class CellKey(NamedTuple):
    """One attack on one defense in one track."""

    track: Track
    defense: str
    attack: str
    adaptive: bool


@dataclass(frozen=True)
class CellTrials:
    """The trials of one attack on one defense. controls: each example's best control score, by place and metric."""

    trials: Sequence[Trial]
    controls: Mapping[Place, Mapping[str, Sequence[float | None]]]

    @property
    def key(self) -> CellKey:
        first = self.trials[0]
        return CellKey(first.track, first.defense, first.attack, first.adaptive)

    @property
    def attack(self) -> str:
        return self.trials[0].attack

    @property
    def defense(self) -> str:
        return self.trials[0].defense

    @property
    def named_defense(self) -> str:
        """The defense with its settings, for readers."""
        return defense_words(self.defense, self.trials[0].defense_settings)

    @property
    def role(self) -> Role:
        return self.trials[0].role

    @property
    def adaptive(self) -> bool:
        return self.trials[0].adaptive

    @property
    def track(self) -> Track:
        return self.trials[0].track

    @property
    def threat(self) -> Threat:
        return self.trials[0].threat

    @cached_property
    def done(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "done"]

    @cached_property
    def valid(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.fault is None]

    @cached_property
    def faults(self) -> Counter[Fault]:
        """The number of trials that are not valid, by reason."""
        return faults_of(self.trials)

    @cached_property
    def victims(self) -> list[list[Trial]]:
        """The valid trials by victim."""
        return by_victim(self.valid)

    @cached_property
    def reconstructed(self) -> list[list[Trial]]:
        """The victims that were reconstructed in one of their trials, with these trials."""
        found = [[trial for trial in group if self.reconstructs(trial)] for group in self.victims]
        return [group for group in found if group]

    @property
    def success_rate(self) -> float | None:
        """The share of victims that were reconstructed."""
        return len(self.reconstructed) / len(self.victims) if self.victims else None

    def reconstructs(self, trial: Trial) -> bool:
        """Whether one of the trial's examples is reconstructed, as this module defines it."""
        return bool(self.rebuilt(trial))

    def rebuilt(self, trial: Trial) -> list[int]:
        """Which of the trial's examples are reconstructed."""
        found = (
            _standing_out(trial, self._controls(trial), metric, least, margin)
            for metric, (least, margin) in THRESHOLDS.items()
        )
        return sorted(set().union(*found))

    @cached_property
    def evidence(self) -> tuple[Trial, int] | None:
        """The trial and the one of its examples that show best what the attack found; None without a score.

        The most leaking trial, of those that reconstructed if there are any; in it, the most leaking example of those
        that were. Where SSIM is the same in print, PSNR decides.
        """
        able = [trial for group in self.reconstructed for trial in group] or self.valid
        able = [trial for trial in able if trial.score("ssim") is not None]
        if not able:
            return None
        trial = max(able, key=lambda trial: _closeness(trial.score("ssim"), trial.score("psnr")))
        ssim, psnr = ([*(trial.scores.get(metric) or ())] for metric in ("ssim", "psnr"))
        examples = self.rebuilt(trial) or range(len(ssim))
        return trial, max(examples, key=lambda index: _closeness(ssim[index], psnr[index] if psnr else None))

    @cached_property
    def exact(self) -> bool:
        """Whether an example of a valid trial is exact."""
        return any(_standing_out(trial, self._controls(trial), "psnr", *EXACT, far=True) for trial in self.valid)

    @cached_property
    def identification(self) -> float | None:
        """The chance of such ranks among decoys, or better ones, without the update; None if there are no ranks."""
        return self._chance(lambda trial: None if trial.rank is None else trial.rank.chance)

    @cached_property
    def label_reading(self) -> float | None:
        """The chance of so many right labels, or more, without the update; None if labels were given."""
        return self._chance(lambda trial: trial.label_chance)

    def _chance(self, chance: Callable[[Trial], float | None]) -> float | None:
        by_group = [[each for trial in group if (each := chance(trial)) is not None] for group in self.victims]
        smallest = [min(1.0, len(group) * min(group)) for group in by_group if group]  # Bonferroni within a victim
        return fisher(smallest) if smallest else None

    def values(self, metric: str) -> dict[str, float]:
        """By the id of each valid trial, the mean of a metric over its examples."""
        found = {trial.id: trial.score(metric) for trial in self.valid}
        return {name: value for name, value in found.items() if value is not None}

    def interval(self, metric: str) -> Interval | None:
        return self._interval(lambda trial: trial.score(metric), *RANGES.get(metric, (None, None)))

    def gain(self, metric: str) -> float | None:
        """The mean difference to the best control on the same victims; above 0 the attack is better."""
        gains = []
        for trial in self.valid:
            own, best = trial.score(metric), mean(self._controls(trial).get(metric, ()))
            if own is not None and best is not None:
                gains.append(own - best if trial.leaks_when(metric) == "high" else best - own)
        return mean(gains)

    def label_accuracy(self) -> Interval | None:
        return self._interval(lambda trial: trial.label_accuracy, *RANGES["label_accuracy"])

    @property
    def labels_read(self) -> list[float]:
        """The label accuracy of each valid trial whose attack was not given the labels."""
        return [trial.label_accuracy for trial in self.valid if trial.label_accuracy is not None]

    def most_leaking(self, metric: str = "ssim") -> str | None:
        """The id of the valid trial whose score leaks most."""
        values = self.values(metric)
        if not values:
            return None
        most = max if self.valid[0].leaks_when(metric) == "high" else min
        return most(values, key=lambda name: values[name])

    def control(self, metric: str) -> float | None:
        """The mean over the cell's victims of the best control score."""
        return mean([mean(self._controls(trial).get(metric, ())) for trial in self.valid])

    def _controls(self, trial: Trial) -> Mapping[str, Sequence[float | None]]:
        return self.controls.get(place_of(trial), {})

    def _interval(
        self, value: Callable[[Trial], float | None], low: float | None, high: float | None
    ) -> Interval | None:
        """The interval of the mean over victims of each victim's mean."""
        means = [mean([value(trial) for trial in group]) for group in self.victims]
        known = [each for each in means if each is not None]
        return interval(known, low, high) if known else None


def gather(trials: Sequence[Trial]) -> list[CellTrials]:
    """The cells of these trials, in the order of their first trials."""
    controls = best_controls(trials)
    groups: dict[CellKey, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(CellKey(trial.track, trial.defense, trial.attack, trial.adaptive), []).append(trial)
    return [CellTrials(group, controls) for group in groups.values()]


def by_victim(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The trials by victim: those of one trial number, and those with the same examples, have one victim."""
    joined: dict[int | str, int | str] = {}

    def victim(key: int | str) -> int | str:
        while joined.setdefault(key, key) != key:
            key = joined[key]
        return key

    for trial in trials:
        if trial.examples is not None:
            joined[victim(trial.examples)] = victim(trial.trial)
    groups: dict[int | str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(victim(trial.trial), []).append(trial)
    return list(groups.values())


def best_controls(trials: Sequence[Trial]) -> dict[Place, dict[str, list[float | None]]]:
    """By place and metric, the best score of any control for each example.

    An attack that asks for further rounds may see other examples than the controls. Each of these is compared with the
    best score of any control for any example of that trial.
    """
    found: dict[Place, dict[str, list[float | None]]] = {}
    for trial in trials:
        if trial.role != "control" or trial.status != "done":
            continue
        best = found.setdefault(place_of(trial), {})
        for metric, scores in trial.scores.items():
            if scores is not None:
                before = best.get(metric, [None] * len(scores))
                best[metric] = [_best(trial, metric, pair) for pair in zip(before, scores, strict=True)]
    beside: dict[Place, dict[str, list[float | None]]] = {}
    for place, best in found.items():
        same = beside.setdefault((*place[:4], None), {})
        for metric, values in best.items():
            same.setdefault(metric, []).extend(values)
    for trial in trials:
        if trial.role == "attack" and place_of(trial) not in found:
            others = beside.get((*place_of(trial)[:4], None), {})
            found[place_of(trial)] = {
                metric: [_best(trial, metric, values)] * len(trial.scores.get(metric) or ())
                for metric, values in others.items()
            }
    return found


def _best(trial: Trial, metric: str, scores: Iterable[float | None]) -> float | None:
    better = max if trial.leaks_when(metric) == "high" else min
    return better((score for score in scores if score is not None), default=None)


def _standing_out(
    trial: Trial,
    controls: Mapping[str, Sequence[float | None]],
    metric: str,
    least: float,
    margin: float,
    *,
    far: bool = False,
) -> list[int]:
    """The examples that score at least `least`, `margin` above the controls, and above their closest decoy.

    far: above the decoys by `margin`, too; with neither controls nor decoys there is nothing to stand out from.
    """
    scores = trial.scores.get(metric) or ()
    beside = controls.get(metric) or [None] * len(scores)
    decoys = trial.decoy_scores.get(metric) or [None] * len(scores)
    found = []
    for index, (score, control, decoy) in enumerate(zip(scores, beside, decoys, strict=True)):
        if score is None or score < least or (control is not None and score < control + margin):
            continue
        if far and control is None and decoy is None:
            continue
        if decoy is None or (score >= decoy + margin if far else score > decoy):
            found.append(index)
    return found


def _closeness(ssim: float | None, psnr: float | None) -> tuple[float, float, float]:
    """A sort key: the most leaking comes last."""
    known = -math.inf if ssim is None else ssim
    return round(known, 2), -math.inf if psnr is None else psnr, known


def place_of(trial: Trial) -> Place:
    return trial.track, trial.defense, trial.trial, trial.round, trial.examples
