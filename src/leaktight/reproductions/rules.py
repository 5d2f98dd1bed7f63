"""Decides a claim by comparisons that its recipe states: an order, a ratio or a tolerance, with an interval.

A comparison is confirmed if the whole 95 % interval of the difference is on the claimed side, refuted if it is all on
the other side, and else open. Values of the same victims or seeds are compared in pairs. A claim *holds* if all its
comparisons are confirmed, *does not hold* if one is refuted and none is confirmed, *holds in part* if some are
confirmed; it is *not testable here* if all are open or there are too few values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from leaktight.audits.judge.statistics import Interval, interval
from leaktight.report.words import counted, listed
from leaktight.reproductions.measure import Samples
from leaktight.reproductions.recipe import Claim, Place, Relation
from leaktight.results.schema import ERROR

Decision: TypeAlias = Literal["holds", "holds in part", "does not hold", "not testable here"]
_State: TypeAlias = Literal["confirmed", "refuted", "open"]
_SHOWN = 3


@dataclass(frozen=True)
class Decided:
    """A claim and what became of it. because: the comparisons in words."""

    claim: Claim
    decision: Decision
    because: str


def decide(claim: Claim, measured: Callable[[Place], Samples], least: int) -> Decided:
    """Decide a claim. measured: the values at a place. least: the number of victims or seeds that it needs."""
    if claim.untestable:
        return Decided(claim, "not testable here", claim.untestable)
    left = measured(claim.left)
    others = [(each, measured(each) if isinstance(each, Place) else {}) for each in claim.right]
    fewest = min(len(left), *(len(samples) for place, samples in others if isinstance(place, Place)), len(left))
    if fewest < least:
        return Decided(claim, "not testable here", f"a place has {counted(fewest, 'valid value')}; {least} are needed")
    found = [(each, _difference(left, each if isinstance(each, float) else other, claim)) for each, other in others]
    states = [_state(difference, claim.relation, claim.by) for _, difference in found]
    words = [_words(each, difference, state) for (each, difference), state in zip(found, states, strict=True)]
    value = interval(list(left.values()), None, None)
    return Decided(claim, _decision(states), f"{claim.left}: {_number(value)} (n = {len(left)}); {listed(words)}")


def _difference(left: Samples, right: Samples | float, claim: Claim) -> Interval:
    """The mean of the left values less the right ones, and its interval: in pairs if they share names, else Welch's."""
    if isinstance(right, float):
        return interval([value - claim.times * right for value in left.values()], None, None)
    if left.keys() == right.keys():
        return interval([left[name] - claim.times * right[name] for name in left], None, None)
    return _welch(list(left.values()), [claim.times * value for value in right.values()])


def _welch(left: Sequence[float], right: Sequence[float]) -> Interval:
    from scipy.special import stdtrit  # slow to import

    middle = float(np.mean(left) - np.mean(right))
    first, second = (float(np.var(each, ddof=1)) / len(each) for each in (left, right))
    if first + second == 0:
        return Interval(middle, middle, middle)
    freedom = (first + second) ** 2 / (first**2 / (len(left) - 1) + second**2 / (len(right) - 1))
    half = float(stdtrit(freedom, 1 - ERROR / 2)) * math.sqrt(first + second)
    return Interval(middle, middle - half, middle + half)


def _state(difference: Interval, relation: Relation, by: float) -> _State:
    """
    >>> _state(Interval(2.0, 1.0, 3.0), "above", 0.0), _state(Interval(2.0, 1.0, 3.0), "near", 2.0)
    ('confirmed', 'open')
    """
    if relation == "below":
        difference = Interval(-difference.mean, -difference.high, -difference.low)
    if relation == "near":
        inside = -by <= difference.low and difference.high <= by
        outside = difference.low > by or difference.high < -by
        return "confirmed" if inside else "refuted" if outside else "open"
    return "confirmed" if difference.low > by else "refuted" if difference.high <= by else "open"


def _decision(states: Sequence[_State]) -> Decision:
    """
    >>> _decision(["confirmed", "open"]), _decision(["open", "refuted"]), _decision(["open"])
    ('holds in part', 'does not hold', 'not testable here')
    """
    if all(state == "confirmed" for state in states):
        return "holds"
    if "confirmed" in states:
        return "holds in part"
    return "does not hold" if "refuted" in states else "not testable here"


def _words(other: Place | float, difference: Interval, state: _State) -> str:
    named = f"{other:g}" if isinstance(other, float) else f"{other.row}, {other.column}"
    return f"less that of {named}: {_number(difference)}, {state}"


def _number(value: Interval) -> str:
    low, middle, high = (f"{each:.{_SHOWN}g}" for each in (value.low, value.mean, value.high))
    return f"{middle} [{low}, {high}]"
