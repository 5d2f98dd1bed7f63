"""The rules of the leaderboard: who has a rank, and which.

1. The figure of a defense is the worst over all attackers and victims: the PSNR of the closest guess of any example. A
   guess no closer than one without the update counts as that one, and above 40 dB nothing is told apart.
2. No rank without an attacker who knows the defense, with valid guesses for at least 10 victims.
3. No rank below the floor of accuracy, 90 % of the accuracy without a defense, or without a measured accuracy.
4. No rank where no attack works on the undefended update: nothing could be found there.
5. Tracks and settings are ranked apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leaktight.report.words import percent
from leaktight.results.card import Card, Setting, is_reference
from leaktight.results.schema import LEVELS, Track

ACCURACY_FLOOR = 0.9
"""The least share of the accuracy without a defense that a ranked one keeps."""
LEAST_VICTIMS = 10
SAME_IMAGE = 40.0
"""dB above which guesses are not told apart."""

RULES = (
    f"Rank by the worst over all attackers and all victims: the PSNR of the closest guess of any example. A guess no "
    f"closer than the best one made without the update counts as that one; above {SAME_IMAGE:g} dB nothing is told "
    "apart. Equal figures share a rank.",
    f"No rank without an attacker who knows the defense, with valid guesses for at least {LEAST_VICTIMS} victims.",
    f"A floor for accuracy: a defense that keeps less than {percent(ACCURACY_FLOOR, 0)} of the accuracy without a "
    "defense, or whose accuracy was not measured, is shown and not ranked.",
    "Where no attack works on the undefended update, nothing is ranked: nothing could be found there.",
    "The diagnostic track (updates that are easy to attack) and the production track (those of a federation's own "
    "training) are apart, and so are settings.",
    "Anybody can add a run, or reconstructions that beat a row; the closest guess counts.",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A card in its table. leak: the figure that ranks it. rank: None if it has none, for the reason `why`."""

    card: Card
    leak: float | None
    rank: int | None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Board:
    """All defenses of one setting in one track, the ranked ones first."""

    track: Track
    setting: Setting
    rows: tuple[Row, ...]


def boards_of(cards: Sequence[Card]) -> tuple[Board, ...]:
    """The tables of a leaderboard: tracks apart, settings apart, those with fewer examples first."""
    groups: dict[tuple[Track, str], list[Card]] = {}
    for card in cards:
        groups.setdefault((card.track, card.setting.name), []).append(card)
    boards = [
        Board(track=group[0].track, setting=group[0].setting, rows=ranked(group)) for _, group in sorted(groups.items())
    ]
    return tuple(sorted(boards, key=lambda board: (board.track, _size(board.setting))))


def ranked(cards: Sequence[Card]) -> tuple[Row, ...]:
    """The cards of one setting in one track with their ranks. Without a rank: by leakage, the reference last."""
    reference = next((card for card in cards if is_reference(card)), None)
    works = reference is None or reference.word in LEVELS
    reasons = [_unranked(card, works=works) for card in cards]
    leaks = [leak_of(card) for card in cards]
    fair = [leak for leak, why in zip(leaks, reasons, strict=True) if not why and leak is not None]
    rows = [
        Row(
            card=card,
            leak=leak,
            rank=None if why or leak is None else 1 + sum(other < leak for other in fair),
            why=why,
        )
        for card, leak, why in zip(cards, leaks, reasons, strict=True)
    ]
    return tuple(sorted(rows, key=_order))


def leak_of(card: Card) -> float | None:
    """The figure that ranks a card."""
    if card.worst is None:
        return None
    return round(min(max(card.worst, card.blind or 0.0), SAME_IMAGE), 1)


def _unranked(card: Card, *, works: bool) -> str:
    """Why a card has no rank; empty if it has one. works: whether an attack works on the undefended update."""
    knowing = max((each.victims for each in card.attackers if each.adaptive), default=0)
    if is_reference(card):
        return "the reference"
    if not works:
        return "no attack works here without a defense"
    if not knowing:
        return f"no attacker who knows the defense{f': {card.no_adaptive}' if card.no_adaptive else ''}"
    if knowing < LEAST_VICTIMS:
        return f"{knowing} victims of an attacker who knows the defense; {LEAST_VICTIMS} are needed"
    if card.utility is None or card.utility.kept is None:
        return "accuracy not measured"
    if card.utility.kept < ACCURACY_FLOOR:
        return f"keeps {percent(card.utility.kept, 0)} of the accuracy; the floor is {percent(ACCURACY_FLOOR, 0)}"
    return ""


def _order(row: Row) -> tuple[bool, bool, float, str]:
    leak = row.leak if row.leak is not None else SAME_IMAGE
    return is_reference(row.card), row.rank is None, leak, row.card.defense


def _size(setting: Setting) -> tuple[int, str]:
    return setting.num_examples if isinstance(setting.num_examples, int) else 10**9, setting.name
