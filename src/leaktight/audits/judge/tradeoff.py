"""The trade-off: leakage, accuracy and time of each defense, the Pareto front, and a recommendation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from leaktight.audits.judge.cells import CellTrials
from leaktight.report.words import defense_words
from leaktight.results.schema import (
    LEVELS,
    UNDEFENDED,
    Leak,
    Plain,
    Recommendation,
    Tradeoff,
    TradeoffRow,
    TrainingSummary,
    Verdict,
)

METRIC = "ssim"
SAME_TIME = 0.1
"""Times per round that differ by less than a tenth count as equal: a machine's timings vary that much."""


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
    defense: str, settings: Mapping[str, Plain], cells: Sequence[CellTrials], training: TrainingSummary | None
) -> TradeoffRow:
    """The row of one defense. training: of the federation with it; None if that failed.

    The time is that of the median round, since the first round also starts the worker processes.
    """
    rounds = training.rounds if training else ()
    attacks = [cell for cell in cells if cell.role == "attack" and cell.track == "diagnostic"]
    own = [cell for cell in attacks if cell.defense == defense and cell.values(METRIC)]
    worst = max(own, key=lambda cell: max(cell.values(METRIC).values()), default=None)
    place = None if worst is None else worst.most_leaking(METRIC)
    interval = None if worst is None else worst.interval(METRIC)
    return TradeoffRow(
        defense=defense,
        settings=dict(settings),
        leak=Leak(
            metric=METRIC,
            worst=None if worst is None or place is None else worst.values(METRIC)[place],
            average=None if interval is None else interval.mean,
            attack=None if worst is None else worst.attack,
            psnr=None if worst is None or place is None else worst.values("psnr").get(place),
        ),
        accuracy=training.final.accuracy if training else None,
        seconds_per_round=median(row.seconds for row in training.rounds) if training else None,
        cost_share=training.defense.share_of_time if training else None,
        client_seconds=_middle(row.client.get("seconds") for row in rounds),
        client_bytes=_middle(row.bytes_up / row.clients for row in rounds if row.clients),
        on_front=False,
    )


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def front(rows: Sequence[TradeoffRow]) -> list[bool]:
    """Which rows are on the Pareto front; rows with unknown figures are not."""
    known = [figures_of(row) for row in rows]
    others = [each for each in known if each is not None]
    return [own is not None and not any(other.beats(own) for other in others) for own in known]


def weigh(rows: Sequence[TradeoffRow], verdicts: Sequence[Verdict]) -> Tradeoff:
    """The `tradeoff` part of `summary.json`."""
    placed = (row.model_copy(update={"on_front": best}) for row, best in zip(rows, front(rows), strict=True))
    return Tradeoff(rows=tuple(placed), recommendation=recommend(rows, verdicts))


def recommend(rows: Sequence[TradeoffRow], verdicts: Sequence[Verdict]) -> Recommendation:
    """Recommend the most accurate defense with the verdict "nothing-found".

    If there is none, recommend nothing and name the one that leaks least. If nothing was found without a defense,
    recommend nothing.
    """
    words = {each.defense: each.verdict for each in verdicts if each.track == "diagnostic"}
    base = next((row for row in rows if row.defense == UNDEFENDED), None)
    if base is None or words.get(UNDEFENDED) not in LEVELS:
        return Recommendation(
            defense=None,
            because="No attack works even without a defense, so no defense can be judged; "
            "use stronger attacks or an easier update.",
        )
    others = [row for row in rows if row.defense != UNDEFENDED and row.accuracy is not None]
    safe = [row for row in others if words.get(row.defense) == "nothing-found"]
    if safe:
        best = max(safe, key=lambda row: (row.accuracy or 0.0, -(row.seconds_per_round or 0.0)))
        return Recommendation(defense=best.defense, because=_praise(best, base, safe))
    others = [row for row in others if words.get(row.defense) != "cannot-conclude"]
    scored = [row for row in others if row.leak.worst is not None]
    least = min(scored, key=lambda row: row.leak.worst or 0.0, default=None)
    if least is None:
        return Recommendation(defense=None, because="No defense could be judged; see the verdicts for the reasons.")
    return Recommendation(
        defense=None,
        because=f"None of these defenses passed: {_name(least)} leaks least ({_leak(least)}), "
        f"at {_accuracy(least)} accuracy. Make it stronger, combine it with another, or use larger batches.",
    )


def _praise(best: TradeoffRow, base: TradeoffRow, safe: Sequence[TradeoffRow]) -> str:
    among = "the only defense" if len(safe) == 1 else f"of {len(safe)} defenses the one with the highest accuracy"
    time = ""
    if best.seconds_per_round and base.seconds_per_round:
        ratio = best.seconds_per_round / base.seconds_per_round
        same = abs(ratio - 1) <= SAME_TIME
        time = " A round takes about as long." if same else f" A round takes {ratio:.1f} times as long."
    return (
        f"{_name(best)} is {among} against which these attacks found nothing: {_leak(best)} against {_leak(base)} "
        f"without a defense; accuracy {_accuracy(best)} against {_accuracy(base)}.{time} "
        "This holds only for these attacks, this scenario and these settings."
    )


def _name(row: TradeoffRow) -> str:
    return defense_words(row.defense, row.settings)


def _leak(row: TradeoffRow) -> str:
    return "no score" if row.leak.worst is None else f"SSIM {row.leak.worst:.2f} at worst"


def _accuracy(row: TradeoffRow) -> str:
    return "unknown" if row.accuracy is None else f"{100 * row.accuracy:.1f} %"
