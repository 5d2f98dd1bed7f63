"""The recommendation of a trade-off: a defense behind which nothing was found, by differences that are no noise.

- A model has **learned** if the 95 % interval of its accuracy lies above the accuracy of always naming the largest
  class, by at least a tenth of what is left to 100 %. Nothing is recommended from a model that has not.
- A defense **leaks less** if the 95 % interval of the difference in SSIM to the undefended updates of the same victims
  lies above 0.
- Two accuracies **differ** if their 95 % intervals do not overlap. Of defenses that do not differ none is preferred.

Accuracy is measured once: its interval (Clopper and Pearson) is that of the test examples, not of other seeds.
"""

from __future__ import annotations

from collections.abc import Sequence

from leaktight.audits.judge.statistics import rate_interval
from leaktight.report.words import counted, defense_words, interval, listed, number, percent, span
from leaktight.results.schema import LEVELS, UNDEFENDED, Recommendation, TradeoffRow, Verdict, Word

LEARNED = 0.1
"""The least share of the way from chance to 100 % that a model has learned."""
SAME_TIME = 0.1
"""Times per round that differ by less than a tenth count as equal: a machine's timings vary that much."""
LONGER = "Train longer (--set federation.rounds=N) or with another learning rate (--set local.learning_rate=X)"


def has_learned(ends: tuple[float, float], chance: float) -> bool:
    """Whether an accuracy with this interval is that of a model that has learned.

    >>> has_learned((0.87, 0.94), 0.1), has_learned((0.08, 0.15), 0.1), has_learned((0.88, 0.93), 0.9)
    (True, False, False)
    """
    return ends[0] > chance + LEARNED * (1 - chance)


def accuracy_interval(accuracy: float, examples: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy that was measured on this number of examples."""
    return rate_interval(round(accuracy * examples), examples)


def recommend(rows: Sequence[TradeoffRow], verdicts: Sequence[Verdict], chance: float | None) -> Recommendation:
    """Recommend the most accurate defense with the verdict "nothing-found", or say why none can be.

    chance: the accuracy of always naming the largest class.
    """
    words = {each.defense: each.verdict for each in verdicts if each.track == "diagnostic"}
    base = next((row for row in rows if row.defense == UNDEFENDED), None)
    if base is None or words.get(UNDEFENDED) not in LEVELS:
        return _nothing(
            "No attack works even without a defense, so no defense can be judged. "
            "Use stronger attacks or an easier update."
        )
    if not base.learned:
        return _nothing(
            f"Without a defense the model has not learned: {_accuracy(base)}{_by_chance(chance)}. What a defense costs "
            f"cannot be seen on it. {LONGER}, and compare again."
        )
    others = [row for row in rows if row.defense != UNDEFENDED and row.accuracy is not None]
    safe = [row for row in others if words.get(row.defense) == "nothing-found"]
    good = [row for row in safe if row.learned and _leaks_less(row)]
    if good:
        return _choose(good, base)
    if safe:
        return _nothing(" ".join(_reason(row, chance) for row in safe))
    return _none_passed(others, words)


def _choose(good: Sequence[TradeoffRow], base: TradeoffRow) -> Recommendation:
    best = max(good, key=lambda row: row.accuracy or 0.0)
    same = [row for row in good if _overlap(row, best)]
    if len(same) == 1:
        among = "the only one" if len(good) == 1 else f"of {counted(len(good), 'defense')} the most accurate one"
        return Recommendation(
            defense=best.defense,
            because=f"It is {among} behind which these attacks found nothing: {_leak(best)}, {_leak(base)} without a "
            f"defense; {_accuracy(best)}, {_accuracy(base)} without{_cost(best, base)}. {_time(best, base)} {_LIMITS}",
        )
    found = listed(f"{_name(row)} with {_accuracy(row)}" for row in same)
    return Recommendation(
        defense=None,
        among=tuple(row.defense for row in same),
        because=f"Nothing was found behind {found}; {_accuracy(base)} without a defense. The test set is too small to "
        "tell these accuracies apart: choose by what else they cost, use a larger test set, or train with several "
        f"seeds. {_LIMITS}",
    )


_LIMITS = "This holds only for these attacks, this scenario and these settings."


def _nothing(because: str) -> Recommendation:
    return Recommendation(defense=None, because=because)


def _reason(row: TradeoffRow, chance: float | None) -> str:
    """Why a defense behind which nothing was found is not recommended, and what to do."""
    found = f"Nothing was found behind {_name(row)}, but"
    if not row.learned:
        return (
            f"{found} its model has not learned: {_accuracy(row)}{_by_chance(chance)}. {LONGER}, or make the defense "
            "weaker."
        )
    less = row.leak.less
    by = "no victim can be compared" if less is None else f"SSIM is lower by {number(less.mean, 'ssim')}"
    ends = f" (95 % interval {interval(less, 'ssim')})" if interval(less, "ssim") else ""
    return f"{found} its updates do not clearly leak less than undefended ones: {by}{ends}. Set more --trials."


def _none_passed(others: Sequence[TradeoffRow], words: dict[str, Word]) -> Recommendation:
    """What to say if every defense leaks, or none could be judged."""
    leaking = [row for row in others if words.get(row.defense) in LEVELS and row.leak.average is not None]
    if not leaking:
        return _nothing("No defense could be judged; the verdicts say why, and what to do.")
    first = min(leaking, key=lambda row: row.leak.average or 0.0)
    same = [row for row in leaking if _leaks_as_much(row, first)]
    undecided = len(leaking) < len(others)
    start = "None of the defenses that could be judged" if undecided else "None of these defenses"
    if len(same) == 1:
        least = f"{_name(first)} leaks least: {_leak(first)}, {_accuracy(first)}."
    else:
        least = f"Which of {listed(map(_name, same))} leaks least cannot be told from so few victims."
    return _nothing(f"{start} held. {least} Make one stronger, combine two, or use larger batches.")


def _leaks_less(row: TradeoffRow) -> bool:
    low = row.leak.less.ci95[0] if row.leak.less is not None and row.leak.less.ci95 is not None else None
    return low is not None and low > 0


def _overlap(row: TradeoffRow, other: TradeoffRow) -> bool:
    return _meet(row.accuracy_ci95, other.accuracy_ci95)


def _leaks_as_much(row: TradeoffRow, other: TradeoffRow) -> bool:
    return _meet(row.leak.ci95, other.leak.ci95)


def _meet(one: tuple[float | None, float | None] | None, two: tuple[float | None, float | None] | None) -> bool:
    """Whether two intervals overlap; those that are not known do."""
    if one is None or two is None or None in one or None in two:
        return True
    return max(one[0] or 0.0, two[0] or 0.0) <= min(one[1] or 0.0, two[1] or 0.0)


def _name(row: TradeoffRow) -> str:
    return defense_words(row.defense, row.settings)


def _leak(row: TradeoffRow) -> str:
    return "no score" if row.leak.worst is None else f"SSIM {number(row.leak.worst, 'ssim')} at worst"


def _accuracy(row: TradeoffRow) -> str:
    """
    >>> from leaktight.results.schema import Leak
    >>> _accuracy(TradeoffRow(defense="noise", leak=Leak(), accuracy=0.913, accuracy_ci95=(0.879, 0.94)))
    'accuracy 91.3 % (95 % interval 87.9 to 94.0 %)'
    """
    if row.accuracy is None:
        return "accuracy unknown"
    ends = span(row.accuracy_ci95, percent)
    return f"accuracy {percent(row.accuracy)}{f' (95 % interval {ends})' if ends else ''}"


def _by_chance(chance: float | None) -> str:
    return "" if chance is None else f", where always naming the largest class has {percent(chance)}"


def _cost(best: TradeoffRow, base: TradeoffRow) -> str:
    return ", which the test set cannot tell apart" if _overlap(best, base) else ""


def _time(best: TradeoffRow, base: TradeoffRow) -> str:
    if not best.seconds_per_round or not base.seconds_per_round:
        return "Time was not measured."
    ratio = best.seconds_per_round / base.seconds_per_round
    return f"A round takes {ratio_words(ratio, SAME_TIME)} as long."


def ratio_words(ratio: float, same: float) -> str:
    """How many times as long something takes. same: the difference that is noise.

    >>> ratio_words(1.04, 0.1), ratio_words(2.345, 0.1)
    ('about', '2.3 times')
    """
    return "about" if abs(ratio - 1) <= same else f"{ratio:.1f} times"
