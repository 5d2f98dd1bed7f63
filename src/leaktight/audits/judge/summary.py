"""Cells and moments of `summary.json`, from trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from leaktight.audits.judge.cells import CellTrials, gather
from leaktight.audits.judge.checks import Raised
from leaktight.audits.judge.statistics import Interval
from leaktight.audits.judge.verdict import Panel
from leaktight.results.schema import Cell, Moment, Score, Trial, mean

ALWAYS = ("psnr", "mse", "ssim", "lpips_alex")
"""Metrics that every cell has, null where they were not computed."""


def cell_of(cell: CellTrials, panel: Panel, raised: Sequence[Raised]) -> Cell:
    """A cell of `summary.json`. raised: the checks of the whole run."""
    found = Cell(
        attack=cell.attack,
        role=cell.role,
        defense=cell.defense,
        adaptive=cell.adaptive,
        track=cell.track,
        threat=cell.threat,
        trials=len(cell.trials),
        failed=len(cell.trials) - len(cell.done),
        valid=len(cell.valid),
        faults=dict(cell.faults.items()),
        victims=len(cell.victims),
        reconstructed=len(cell.reconstructed) if cell.role == "attack" else None,
        success_rate=cell.success_rate if cell.role == "attack" else None,
        identification=panel.identification.get(cell.key),
        label_reading=panel.label_reading.get(cell.key),
        control={metric: cell.control(metric) for metric in ("psnr", "ssim")},
        seconds=sum(trial.seconds for trial in cell.trials) / len(cell.trials),
        flags=tuple(dict.fromkeys(each.check.code for each in raised if each.finding.concerns(cell))),
        trial_ids=tuple(trial.id for trial in cell.trials),
        chosen=dict(Counter(trial.chosen for trial in cell.valid if trial.chosen is not None).most_common()),
        oracle=_oracle(cell),
    )
    metrics = dict.fromkeys((*ALWAYS, *(name for trial in cell.done for name in trial.scores)))
    labels = cell.label_accuracy()
    read = None if labels is None else _score(labels, max(cell.labels_read))
    return found.with_scores({**{name: _figure(cell, name) for name in metrics}, "label_accuracy": read})


def _oracle(cell: CellTrials) -> dict[str, float | None]:
    """The mean scores of the best guesses of an ensemble, by the truth; empty for other attacks."""
    best = [trial.oracle.scores for trial in cell.valid if trial.oracle is not None]
    return {name: mean([each.get(name) for each in best]) for name in (best[0] if best else ())}


def over_time(trials: Sequence[Trial]) -> tuple[Moment, ...] | None:
    """Leakage and accuracy by round; None unless several rounds were attacked in the diagnostic track."""
    trials = [trial for trial in trials if trial.track == "diagnostic"]
    rounds = sorted({trial.round for trial in trials})
    if len(rounds) < 2:
        return None
    moments = [
        _moment(cell, number)
        for number in rounds
        for cell in gather([trial for trial in trials if trial.round == number])
        if cell.role == "attack" and cell.valid
    ]
    return tuple(sorted(moments, key=lambda moment: (moment.defense, moment.attack, moment.round)))


def _moment(cell: CellTrials, round_index: int) -> Moment:
    return Moment(
        defense=cell.defense,
        attack=cell.attack,
        adaptive=cell.adaptive,
        round=round_index,
        accuracy=cell.trials[0].model_accuracy,
        success_rate=cell.success_rate,
        trials=len(cell.valid),
    ).with_scores({name: _figure(cell, name) for name in ("psnr", "ssim")})


def _figure(cell: CellTrials, metric: str) -> Score | None:
    interval, worst = cell.interval(metric), cell.most_leaking(metric)
    return None if interval is None or worst is None else _score(interval, cell.values(metric)[worst])


def _score(interval: Interval, worst: float) -> Score:
    return Score(mean=interval.mean, ci95=(interval.low, interval.high), worst=worst)
