"""What attacks found, as sentences with the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from leaktight.audits.judge.cells import CellTrials
from leaktight.audits.judge.statistics import rate_interval
from leaktight.report.judgements import chance_words
from leaktight.report.words import counted, listed, metric_words, number
from leaktight.results.schema import Fault, Level, Significance, mean

REMEDIES: Mapping[Fault, str] = {
    "ended in an error": "Read the errors of the failed trials and repair their cause",
    "gave values that are not finite": 'Lower the step size of the attack, or set its precision = "float64"',
    "its own loss did not fall": "Give the attack more iterations, another step size or more restarts",
}
"""What to do about a fault of trials."""


def found(level: Level, cell: CellTrials, test: Significance | None) -> str:
    """What an attack found, with the evidence. test: of the identification or of the labels."""
    if level == "reconstructed":
        low, high = rate_interval(len(cell.reconstructed), len(cell.victims))
        return (
            f"{named(cell)} reconstructed {share(cell)} (95 % interval of the rate {100 * low:.0f} to "
            f"{100 * high:.0f} %): {scores(cell)}."
        )
    if level == "identified":
        ranks = [trial.rank for trial in cell.valid if trial.rank is not None]
        usual = f"place {median(each.place for each in ranks):g} of {median(each.decoys for each in ranks) + 1:g}"
        return (
            f"The guesses of {named(cell)} pick out their victims among decoys of the same class: {usual} in the "
            f"median over {count(cell)}, {by_chance(test)}; {scores(cell)}."
        )
    labels = cell.label_accuracy()
    blind = [each for trial in cell.valid if (each := trial.blind_labels) is not None]
    beside = f" (a guess without the update: {number(mean(blind), 'label_accuracy')})" if blind else ""
    read = "labels" if labels is None else f"{number(labels.mean, 'label_accuracy')} of the labels"
    return (
        f"{named(cell)} read {read} from the updates of {count(cell)}{beside}, "
        f"{by_chance(test)}; images were not found: {scores(cell)}."
    )


def by_chance(test: Significance | None) -> str:
    """How often chance alone would give such a result.

    >>> by_chance(Significance(victims=5, chance=0.01, corrected=0.03))
    'by chance in 3.0 % of runs'
    """
    if test is None:
        return "not tested"
    return f"by chance in {chance_words(test.corrected).replace('<', 'fewer than')} of runs"


def named(cell: CellTrials) -> str:
    return f"{cell.attack} (knowing the defense)" if cell.adaptive else cell.attack


def scores(cell: CellTrials) -> str:
    """Mean SSIM and PSNR, with those of the controls."""
    parts = []
    for metric in ("ssim", "psnr"):
        score, control = cell.interval(metric), cell.control(metric)
        if score is not None:
            beside = "" if control is None else f" (without the update {number(control, metric)})"
            parts.append(f"{metric_words(metric).label} {number(score.mean, metric)} on average{beside}")
    return ", ".join(parts) or "no score is finite"


def share(cell: CellTrials | None) -> str:
    return "no victim" if cell is None else f"{len(cell.reconstructed)} of {count(cell)}"


def count(cell: CellTrials) -> str:
    return counted(len(cell.victims), "victim")


def faults(cell: CellTrials) -> str:
    """The reasons of invalid trials with their numbers, and the first error."""
    reasons = listed(f"{count} of {len(cell.trials)} {fault}" for fault, count in cell.faults.most_common())
    error = next((trial.error.rstrip(".") for trial in cell.trials if trial.error), None)
    return reasons if error is None else f"{reasons} ({error})"


def remedy(cell: CellTrials) -> str:
    return REMEDIES[cell.faults.most_common(1)[0][0]]
