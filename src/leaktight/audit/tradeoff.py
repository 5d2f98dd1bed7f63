"""Leakage against accuracy against time: one row for each defense, those that no other beats, and a recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from leaktight.audit.cells import Cell
from leaktight.audit.plan import UNDEFENDED
from leaktight.audit.verdict import Verdict

METRIC = "ssim"
SAME_TIME = 0.1
"""Times per round that differ by less than a tenth count as equal: machines are not steadier than that."""


class Figures(NamedTuple):
    """The three things that a defense is weighed by."""

    leak: float
    accuracy: float
    seconds: float

    def beats(self, other: Figures) -> bool:
        """Whether these are at least as good in all three, and better in one."""
        slower = self.seconds > other.seconds * (1 + SAME_TIME)
        faster = self.seconds * (1 + SAME_TIME) < other.seconds
        if self.leak > other.leak or self.accuracy < other.accuracy or slower:
            return False
        return self.leak < other.leak or self.accuracy > other.accuracy or faster


@dataclass(frozen=True)
class Row:
    """leak: the SSIM of the most leaking trial of any attack; None where there is none. accuracy: after all rounds.

    seconds: of the median round; the first one of a run also starts the worker processes.
    """

    defense: str
    settings: Mapping[str, Any]
    leak: float | None
    mean: float | None
    psnr: float | None
    attack: str | None
    accuracy: float | None
    seconds: float | None
    cost_share: float | None

    @property
    def figures(self) -> Figures | None:
        """What is weighed, if all of it is known."""
        if self.leak is None or self.accuracy is None or self.seconds is None:
            return None
        return Figures(self.leak, self.accuracy, self.seconds)


def make_row(
    defense: str, settings: Mapping[str, Any], cells: Sequence[Cell], training: Mapping[str, Any] | None
) -> Row:
    """training: the summary of the federation trained with this defense; None where training failed."""
    own = [cell for cell in cells if cell.role == "attack" and cell.defense == defense and cell.values(METRIC)]
    worst = max(own, key=lambda cell: max(cell.values(METRIC).values()), default=None)
    place = None if worst is None else worst.most_leaking(METRIC)
    rounds = training["rounds"] if training else []
    interval = None if worst is None else worst.interval(METRIC)
    return Row(
        defense=defense,
        settings=settings,
        leak=None if worst is None or place is None else worst.values(METRIC)[place],
        mean=None if interval is None else interval.mean,
        psnr=None if worst is None or place is None else worst.values("psnr").get(place),
        attack=None if worst is None else worst.attack,
        accuracy=training["final"]["accuracy"] if training else None,
        seconds=median(row["seconds"] for row in rounds) if rounds else None,
        cost_share=training["defense"]["share_of_time"] if training else None,
    )


def front(rows: Sequence[Row]) -> list[bool]:
    """Which rows no other row beats, among those whose figures are all known."""
    known = [row.figures for row in rows if row.figures is not None]
    return [row.figures is not None and not any(other.beats(row.figures) for other in known) for row in rows]


def weigh(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The `tradeoff` part of `summary.json`."""
    return {
        "rows": [
            {
                "defense": row.defense,
                "settings": dict(row.settings),
                "leak": {
                    "metric": METRIC,
                    "worst": row.leak,
                    "average": row.mean,
                    "attack": row.attack,
                    "psnr": row.psnr,
                },
                "accuracy": row.accuracy,
                "seconds_per_round": row.seconds,
                "cost_share": row.cost_share,
                "on_front": on_front,
            }
            for row, on_front in zip(rows, front(rows), strict=True)
        ],
        "recommendation": recommend(rows, verdicts),
    }


def recommend(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Among the defenses against which no attacker found a leak, the one that keeps most accuracy.

    Where there is none, nothing is recommended, and the one that leaks least is named. Nothing can be recommended
    either where no attack works without a defense.
    """
    words = {row.defense: [each for each in verdicts if each.defense == row.defense] for row in rows}
    base = next((row for row in rows if row.defense == UNDEFENDED), None)
    if base is None or all(each.verdict == "cannot-conclude" for each in words[UNDEFENDED]):
        return {
            "defense": None,
            "because": "No attack works even without a defense, so nothing was learnt about any of them; "
            "use stronger attacks or an easier update.",
        }
    others = [row for row in rows if row.defense != UNDEFENDED and row.accuracy is not None]
    safe = [row for row in others if words[row.defense] and all(v.verdict == "not-found" for v in words[row.defense])]
    if safe:
        best = max(safe, key=lambda row: (row.accuracy or 0.0, -(row.seconds or 0.0)))
        return {"defense": best.defense, "because": _praise(best, base, safe)}
    least = min((row for row in others if row.leak is not None), key=lambda row: row.leak or 0.0, default=None)
    if least is None:
        return {"defense": None, "because": "No defense could be judged; see the flags for the reasons."}
    return {
        "defense": None,
        "because": f"None of these defenses passed: {least.defense} leaks least ({_leak(least)}), "
        f"at {_accuracy(least)} accuracy. Raise its strength, combine it with another, or use larger batches.",
    }


def _praise(best: Row, base: Row, safe: Sequence[Row]) -> str:
    among = "the only defense" if len(safe) == 1 else f"of {len(safe)} defenses the one with the highest accuracy"
    time = ""
    if best.seconds and base.seconds:
        ratio = best.seconds / base.seconds
        same = abs(ratio - 1) <= SAME_TIME
        time = " A round takes about as long." if same else f" A round takes {ratio:.1f} times as long."
    return (
        f"{best.defense} is {among} against which these attacks found no leak: {_leak(best)} against {_leak(base)} "
        f"without a defense; accuracy {_accuracy(best)} against {_accuracy(base)}.{time} "
        "It holds for these attacks, this scenario and these settings alone."
    )


def _leak(row: Row) -> str:
    return "no score" if row.leak is None else f"SSIM {row.leak:.2f} at worst"


def _accuracy(row: Row) -> str:
    return "unknown" if row.accuracy is None else f"{100 * row.accuracy:.1f} %"
