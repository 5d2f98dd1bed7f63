"""What the runs of a recipe measured: values by victim or seed, chosen by rows and columns."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TypeAlias

from leaktight.audits.judge.cells import CellTrials, gather
from leaktight.core.errors import ConfigError, suggestion
from leaktight.results.schema import TrainingSummary, Trial

Samples: TypeAlias = Mapping[str, float]
"""Values by victim ("victim 3") or seed ("seed 1"): values with the same name may be compared in pairs."""

Ends: TypeAlias = tuple[float | None, float | None]
"""The least and the largest value that a metric can have; None where it is not limited."""

_CHOICES = ("part", "metric", "attack", "defense", "adaptive", "finished", "percent_of")
_BEST = "best_"


def from_audit(trials: Iterable[Trial], choice: Mapping[str, object]) -> Samples:
    """The values of a metric by victim, from valid trials of the chosen attack on the chosen defense.

    choice: metric: a score, "best_" and a score (of the example that leaks most, not their mean), or "loss" (of the
    search), "label_accuracy", "identified", "reconstructed", "seconds" or "client_seconds"; "ssim >= 0.2" is the share
    of the examples with such scores, and "... %" is a share in percent.
    attack, defense: the name in the results, or a table with its kind and settings. adaptive: whether the attacker
    knows the defense. finished: also trials whose own loss did not fall, as behind much noise it cannot. Several trials
    of a victim are averaged.
    """
    metric = str(choice.get("metric", "psnr"))
    found: dict[str, list[float]] = {}
    for cell in chosen(trials, choice):
        for trial in counted(cell, choice):
            value = _value(trial, cell, metric)
            if value is not None:
                found.setdefault(f"victim {trial.trial}", []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def from_training(summaries: Mapping[str, TrainingSummary], choice: Mapping[str, object]) -> Samples:
    """The values of a metric by seed: "accuracy" (final, in percent), "best_accuracy", "loss", "seconds_per_round",
    "bytes_up", or a figure of the defense such as "share_of_time"."""
    _require_known(choice)
    metric = str(choice.get("metric", "accuracy"))
    values = {name: _of_training(summary, metric) for name, summary in summaries.items()}
    return {name: value for name, value in values.items() if value is not None}


def ends(choice: Mapping[str, object]) -> Ends:
    """The ends of a metric that is a share of trials or examples; such values tell little by their spread.

    >>> ends({"metric": "reconstructed"}), ends({"metric": "ssim >= 0.2 %"}), ends({"metric": "psnr"})
    ((0.0, 1.0), (0.0, 100.0), (None, None))
    """
    metric = str(choice.get("metric", ""))
    share = metric.removesuffix(_PERCENT)
    if "percent_of" in choice or not (share in _SHARES or _LIMIT.fullmatch(share)):
        return None, None
    return 0.0, 1.0 if share == metric else 100.0


def _require_known(choice: Mapping[str, object]) -> None:
    for name in choice:
        if name not in _CHOICES:
            raise ConfigError(f"a row or column chooses {name!r}; {suggestion(name, _CHOICES)}")


def chosen(trials: Iterable[Trial], choice: Mapping[str, object]) -> list[CellTrials]:
    """The trials of the chosen attack on the chosen defense, one cell unless the choice leaves several."""
    _require_known(choice)
    return [cell for cell in gather(list(trials)) if _is_chosen(cell, choice)]


def counted(cell: CellTrials, choice: Mapping[str, object]) -> list[Trial]:
    """The trials of a cell that count: the valid ones, or all that are finished."""
    return cell.done if choice.get("finished") else cell.valid


def _is_chosen(cell: CellTrials, choice: Mapping[str, object]) -> bool:
    first = cell.trials[0]
    return (
        _fits(first.attack, first.attack_settings, choice.get("attack"))
        and _fits(first.defense, first.defense_settings, choice.get("defense", "none"))
        and first.adaptive is bool(choice.get("adaptive", False))
        and first.track == "diagnostic"
    )


def _fits(name: str, settings: Mapping[str, object], wanted: object) -> bool:
    """Whether this is the method: its name, or its kind with settings of these values."""
    if isinstance(wanted, Mapping):
        own = {"kind": name.partition("(")[0], **settings}
        return all(own.get(key) == value for key, value in wanted.items())
    return name == wanted


def _value(trial: Trial, cell: CellTrials, metric: str) -> float | None:
    if metric.endswith(_PERCENT):
        share = _value(trial, cell, metric.removesuffix(_PERCENT))
        return None if share is None else 100 * share
    if (limit := _LIMIT.fullmatch(metric)) is not None:
        return _share(trial, *limit.groups())
    if metric in _OF_TRIALS:
        return _OF_TRIALS[metric](trial, cell)
    if metric.startswith(_BEST):
        return _best(trial, metric.removeprefix(_BEST))
    return trial.score(metric)


def _best(trial: Trial, metric: str) -> float | None:
    """The score of the example that leaks most."""
    known = [score for score in trial.scores.get(metric) or () if score is not None]
    pick = max if trial.leaks_when(metric) == "high" else min
    return pick(known) if known else None


def _share(trial: Trial, metric: str, sign: str, limit: str) -> float | None:
    """The share of a trial's examples whose score keeps the limit."""
    scores = [score for score in trial.scores.get(metric) or () if score is not None]
    return fmean(_KEEPS[sign](score, float(limit)) for score in scores) if scores else None


_SHARES = ("label_accuracy", "identified", "reconstructed")
_PERCENT = " %"
_LIMIT = re.compile(r"(\w+) (>=|<=) (\S+)")
_KEEPS: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}


_OF_TRIALS: Mapping[str, Callable[[Trial, CellTrials], float | None]] = {
    "label_accuracy": lambda trial, cell: trial.label_accuracy,
    "identified": lambda trial, cell: None if trial.rank is None else float(trial.rank.place == 1),
    "reconstructed": lambda trial, cell: float(cell.reconstructs(trial)),
    "loss": lambda trial, cell: trial.loss,
    "seconds": lambda trial, cell: trial.seconds,
    "client_seconds": lambda trial, cell: trial.client_seconds,
}


def _of_training(summary: TrainingSummary, metric: str) -> float | None:
    if metric in _OF_TRAINING:
        return _OF_TRAINING[metric](summary)
    figure = summary.defense.facts().get(metric)
    return float(figure) if isinstance(figure, int | float) else None


def _percent(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return 100 * max(known) if known else None


_OF_TRAINING: Mapping[str, Callable[[TrainingSummary], float | None]] = {
    "accuracy": lambda summary: _percent([summary.final.accuracy]),
    "best_accuracy": lambda summary: _percent([row.accuracy for row in summary.rounds]),
    "loss": lambda summary: summary.final.loss,
    "seconds_per_round": lambda summary: fmean(row.seconds for row in summary.rounds),
    "bytes_up": lambda summary: fmean(row.bytes_up for row in summary.rounds),
}
