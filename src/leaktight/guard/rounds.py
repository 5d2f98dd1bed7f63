"""Which round numbers a client believes, by the rounds that it has taken part in itself."""

from __future__ import annotations

RISK = 1e-6
"""The chance that an honest number is not believed."""

LATE = 20
"""Rounds that may have gone by without this client: it joined later, or could not answer."""


def fault(number: object, last: int, seen: int, share: float) -> str | None:
    """Why the index of a round cannot be right, or None.

    last: the index of the last round, -1 for none. seen: the rounds of this client before this one. share: the part of
    the clients drawn in a round.
    """
    if type(number) is not int or number < 0:
        return f"{number!r:.40} is not a round number"
    if number <= last:
        return f"round {number + 1} comes after round {last + 1}"
    from scipy import stats  # slow to import

    most = LATE + seen + 1 + int(stats.nbinom.ppf(1 - RISK, seen + 1, share))
    if number >= most:
        return f"round {number + 1} is beyond {most}, the most that {seen + 1} own rounds make likely"
    return None


def elapsed(number: int, last: int, share: float) -> int:
    """How many rounds have passed since the last one: as stated, but no more than the plan makes likely."""
    from scipy import stats  # slow to import

    return max(1, min(number - last, int(stats.geom.ppf(1 - RISK, share)) if share < 1 else 1))
