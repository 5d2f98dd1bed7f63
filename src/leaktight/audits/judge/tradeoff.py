"""The trade-off: leakage, accuracy and time of each defense, and the Pareto front."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from leaktight.audits.judge.cells import RANGES, CellTrials
from leaktight.audits.judge.recommend import SAME_TIME, accuracy_interval, has_learned, recommend
from leaktight.audits.judge.statistics import interval
from leaktight.results.schema import (
    UNDEFENDED,
    Leak,
    Plain,
    Score,
    Tradeoff,
    TradeoffRow,
    TrainingSummary,
    Verdict,
    mean,
)

METRIC = "ssim"


class Scored(NamedTuple):
    """What accuracy was measured on: the number of examples, and the share of the largest class (chance)."""

    examples: int
    chance: float


class Figures(NamedTuple):
    """What defenses are compared by. leak: SSIM of the most leaking trial. seconds: per round."""

    leak: float
    accuracy: float
    seconds: float

    def beats(self, other: Figures) -> bool:
        """Whether all three are at least as good, and one is better."""
        slower = self.seconds > other.seconds * (1 + SAME_TIME)
        faster = self.seconds * (1 + SAME_TIME) < other.seconds
        if self.leak > other.leak or self.accuracy < other.accuracy or slower:
            return False
        return self.leak < other.leak or self.accuracy > other.accuracy or faster


def figures_of(row: TradeoffRow) -> Figures | None:
    """The figures of a row; None if one of them is unknown."""
    if row.leak.worst is None or row.accuracy is None or row.seconds_per_round is None:
        return None
    return Figures(row.leak.worst, row.accuracy, row.seconds_per_round)


def make_row(
    defense: str,
    settings: Mapping[str, Plain],
    cells: Sequence[CellTrials],
    training: TrainingSummary | None,
    scored: Scored,
) -> TradeoffRow:
    """The row of one defense. training: of the federation with it; None if that failed. scored: how it was scored.

    The time is that of the median round, since the first round also starts the worker processes.
    """
    rounds = training.rounds if training else ()
    accuracy = training.final.accuracy if training else None
    ends = None if accuracy is None else accuracy_interval(accuracy, scored.examples)
    return TradeoffRow(
        defense=defense,
        settings=dict(settings),
        leak=_leak(cells, defense),
        accuracy=accuracy,
        accuracy_ci95=ends,
        learned=None if ends is None else has_learned(ends, scored.chance),
        seconds_per_round=median(row.seconds for row in training.rounds) if training else None,
        cost_share=training.defense.share_of_time if training else None,
        client_seconds=_middle(row.client.get("seconds") for row in rounds),
        client_bytes=_middle(row.bytes_up / row.clients for row in rounds if row.clients),
        on_front=False,
    )


def _leak(cells: Sequence[CellTrials], defense: str) -> Leak:
    worst = _strongest(cells, defense)
    if worst is None:
        return Leak(metric=METRIC)
    place, average, bare = worst.most_leaking(METRIC), worst.interval(METRIC), _strongest(cells, UNDEFENDED)
    return Leak(
        metric=METRIC,
        worst=None if place is None else worst.values(METRIC)[place],
        average=None if average is None else average.mean,
        ci95=None if average is None else (average.low, average.high),
        attack=worst.attack,
        psnr=None if place is None else worst.values("psnr").get(place),
        less=None if bare is None or defense == UNDEFENDED else _less(worst, bare),
    )


def _strongest(cells: Sequence[CellTrials], defense: str) -> CellTrials | None:
    """The attack with the most leaking trial."""
    own = [cell for cell in cells if (cell.role, cell.track, cell.defense) == ("attack", "diagnostic", defense)]
    return max(
        (cell for cell in own if cell.values(METRIC)),
        key=lambda cell: max(cell.values(METRIC).values()),
        default=None,
    )


def _less(defended: CellTrials, bare: CellTrials) -> Score | None:
    """How much less an attack gets of the same victims than one of undefended updates: the mean and its interval."""
    plain = {(trial.trial, trial.round): trial.score(METRIC) for trial in bare.valid}
    found = []
    for group in defended.victims:
        both = [(plain.get((trial.trial, trial.round)), trial.score(METRIC)) for trial in group]
        own = mean(one - two for one, two in both if one is not None and two is not None)
        if own is not None:
            found.append(own)
    if not found:
        return None
    low, high = RANGES[METRIC]
    over = interval(found, low - high, high - low)
    return Score(mean=over.mean, ci95=(over.low, over.high))


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def front(rows: Sequence[TradeoffRow]) -> list[bool]:
    """Which rows are on the Pareto front; rows with unknown figures are not."""
    known = [figures_of(row) for row in rows]
    others = [each for each in known if each is not None]
    return [own is not None and not any(other.beats(own) for other in others) for own in known]


def weigh(rows: Sequence[TradeoffRow], verdicts: Sequence[Verdict], scored: Scored) -> Tradeoff:
    """The `tradeoff` part of `summary.json`."""
    placed = (row.model_copy(update={"on_front": best}) for row, best in zip(rows, front(rows), strict=True))
    return Tradeoff(
        rows=tuple(placed),
        recommendation=recommend(rows, verdicts, scored.chance),
        chance=scored.chance,
        examples=scored.examples,
    )
