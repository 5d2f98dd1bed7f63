"""Decides a claim by comparisons that its recipe states: an order, a ratio or a tolerance, with an interval.

A comparison is confirmed if the whole 95 % interval of the difference is on the claimed side, refuted if it is all on
the other side, and else open. Values of the same victims or seeds are compared in pairs. Intervals are Student's; for
shares, which may all be equal by chance, they are limits that hold for any values between 0 and 1. A claim *holds* if
all its comparisons are confirmed, *does not hold* if one is refuted and none is confirmed, *holds in part* if some are
confirmed; it is *not testable here* if all are open or there are too few values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from leaktight.audits.judge.statistics import Interval, interval
from leaktight.report.words import counted, listed
from leaktight.reproductions.measure import Ends, Samples
from leaktight.reproductions.recipe import Claim, Place, Relation
from leaktight.results.schema import ERROR

Decision: TypeAlias = Literal["holds", "holds in part", "does not hold", "not testable here"]
_State: TypeAlias = Literal["confirmed", "refuted", "open"]
_SHOWN = 3
_NO_ENDS: Ends = (None, None)


@dataclass(frozen=True)
class Decided:
    """A claim and what became of it. because: the comparisons in words.

    undecided: there were enough values, and every comparison is open.
    """

    claim: Claim
    decision: Decision
    because: str
    undecided: bool = False


def decide(
    claim: Claim,
    measured: Callable[[Place], Samples],
    least: int,
    ends: Callable[[Place], Ends] = lambda place: _NO_ENDS,
) -> Decided:
    """Decide a claim.

    measured: the values at a place. least: the number of victims or seeds that it needs. ends: of values at a place.
    """
    if claim.untestable:
        return Decided(claim, "not testable here", claim.untestable)
    left = Values(measured(claim.left), ends(claim.left))
    others = [(each, Values(measured(each), ends(each)) if isinstance(each, Place) else each) for each in claim.right]
    fewest = min(len(each.samples) for each in (left, *(other for _, other in others)) if isinstance(each, Values))
    if fewest < least:
        return Decided(claim, "not testable here", f"a place has {counted(fewest, 'valid value')}; {least} are needed")
    found = [(each, _difference(left, other, claim.times)) for each, other in others]
    states = [_state(difference, claim.relation, claim.by) for _, difference in found]
    words = [_words(each, difference, state) for (each, difference), state in zip(found, states, strict=True)]
    number = f"{_number(left.interval)} (n = {len(left.samples)})"
    undecided = all(state == "open" for state in states)
    return Decided(claim, _decision(states), f"{claim.left}: {number}; {listed(words)}", undecided)


class Values(NamedTuple):
    """The values at a place, and their ends."""

    samples: Samples
    ends: Ends

    @property
    def interval(self) -> Interval:
        return interval(list(self.samples.values()), *self.ends)

    def times(self, factor: float) -> Values:
        """The values multiplied by a positive number."""
        low, high = (None if each is None else factor * each for each in self.ends)
        return Values({name: factor * value for name, value in self.samples.items()}, (low, high))


def _difference(left: Values, right: Values | float, times: float) -> Interval:
    """The mean of the left values less the right ones, and its interval: in pairs if they share names."""
    if isinstance(right, float):
        middle, low, high = left.interval
        return Interval(middle - times * right, low - times * right, high - times * right)
    right = right.times(times)
    if left.samples.keys() == right.samples.keys():
        pairs = [left.samples[name] - right.samples[name] for name in left.samples]
        return interval(pairs, _less(left.ends[0], right.ends[1]), _less(left.ends[1], right.ends[0]))
    if _NO_ENDS in (left.ends, right.ends):
        return _welch(list(left.samples.values()), list(right.samples.values()))
    return _combined(left.interval, right.interval)


def _less(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


def _combined(left: Interval, right: Interval) -> Interval:
    """The interval of a difference from those of both sides (Zou and Donner, 2008)."""
    middle = left.mean - right.mean
    below = math.hypot(left.mean - left.low, right.high - right.mean)
    above = math.hypot(left.high - left.mean, right.mean - right.low)
    return Interval(middle, middle - below, middle + above)


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
