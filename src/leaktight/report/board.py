"""The page of the leaderboard: one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leaktight.report.html import fill
from leaktight.report.judgements import TRACKS
from leaktight.report.standings import RULES, SAME_IMAGE, Board, Row, boards_of
from leaktight.report.words import (
    MISSING,
    VERDICTS,
    counted,
    defense_words,
    interval,
    number,
    percent,
    seconds,
    threat_words,
)
from leaktight.results.card import Attacker, Card, Setting, Utility, is_reference
from leaktight.results.schema import UNDEFENDED, Track

_KILO = 1000


@dataclass(frozen=True, kw_only=True)
class Overview:
    """One track at a glance: the figure and the verdict of each defense (rows) in each setting (columns).

    defenses: their names with settings.
    """

    track: Track
    note: str
    boards: tuple[Board, ...]
    defenses: tuple[str, ...]

    def field(self, defense: str, board: Board) -> Row | None:
        """The row of a defense in a setting, if it was tried there."""
        return next((row for row in board.rows if _name(row) == defense), None)


def render_leaderboard(cards: Sequence[Card]) -> str:
    """The page of these cards."""
    boards = boards_of(cards)
    tracks: list[Track] = list(dict.fromkeys(board.track for board in boards))
    overviews = [_overview(track, [board for board in boards if board.track == track]) for track in tracks]
    return fill(
        "leaderboard.html.j2",
        title="Leaderboard of defenses",
        overviews=overviews,
        rules=RULES,
        same=SAME_IMAGE,
        cards=len(cards),
        setting_words=setting_words,
        setting_facts=setting_facts,
        attacker_cells=attacker_cells,
        share_words=share_words,
        cost_words=cost_words,
        accuracy_words=accuracy_words,
        verdicts=VERDICTS,
        is_reference=is_reference,
    )


def _overview(track: Track, boards: Sequence[Board]) -> Overview:
    names = dict.fromkeys(_name(row) for board in boards for row in board.rows)
    known = {_name(row) for board in boards for row in board.rows if row.card.strongest(adaptive=True)}
    bare = defense_words(UNDEFENDED)
    order = sorted(names, key=lambda name: (name == bare, name not in known, _mean_leak(name, boards), name))
    return Overview(track=track, note=TRACKS[track], boards=tuple(boards), defenses=tuple(order))


def _name(row: Row) -> str:
    return defense_words(row.card.defense, row.card.defense_settings)


def _mean_leak(defense: str, boards: Sequence[Board]) -> float:
    leaks = [row.leak for board in boards for row in board.rows if _name(row) == defense and row.leak is not None]
    return sum(leaks) / len(leaks) if leaks else SAME_IMAGE


def setting_words(setting: Setting, *, short: bool = False) -> str:
    """A setting in a few words."""
    updates = f"batch {setting.batch_size}, {_counted(setting.local_steps, 'step')}"
    parts = [str(setting.data.get("kind")), f"{setting.model.get('init')} weights", updates]
    if setting.round:
        parts.append(f"round {setting.round}")
    if short:
        return ", ".join(parts)
    behind = _counted(setting.num_examples, "example")
    return f"{', '.join(parts)}: {setting.model.get('kind')}, {behind} behind an update"


def _counted(amount: int | str, noun: str) -> str:
    return counted(amount, noun) if isinstance(amount, int) else f"? {noun}s"


def setting_facts(setting: Setting) -> str:
    """The rest of a setting, for readers."""
    rest = {key: value for key, value in setting.model.items() if key not in ("kind", "init")}
    model = ", ".join(f"{key} {value}" for key, value in rest.items() if not isinstance(value, list | dict))
    rate = setting.local.get("learning_rate")
    return f"Network: {model}. Learning rate {rate}. {threat_words(setting.threat)}"


def attacker_cells(attacker: Attacker | None) -> tuple[str, str]:
    """The mean PSNR of an attacker and its interval."""
    if attacker is None:
        return MISSING, ""
    return number(attacker.psnr.mean, "psnr"), interval(attacker.psnr, "psnr")


def share_words(attacker: Attacker | None) -> str:
    """How many victims an attacker reconstructed."""
    if attacker is None or attacker.reconstructed is None:
        return MISSING
    return f"{attacker.reconstructed} of {attacker.victims}"


def accuracy_words(utility: Utility | None) -> str:
    """Accuracy with a defense, and what was lost."""
    if utility is None or utility.accuracy is None:
        return MISSING
    if utility.plain_accuracy is None or utility.accuracy == utility.plain_accuracy:
        return percent(utility.accuracy)
    return f"{percent(utility.accuracy)} ({100 * (utility.accuracy - utility.plain_accuracy):+.1f})".replace("-", "−")


def cost_words(utility: Utility | None) -> tuple[str, str]:
    """The seconds of a client's round and the bytes that it sends, each beside no defense."""
    if utility is None:
        return MISSING, MISSING
    size = MISSING if utility.bytes_up is None else f"{utility.bytes_up / _KILO:.1f} kB"
    return (
        seconds(utility.seconds) + _times(utility.seconds, utility.plain_seconds),
        size + _times(utility.bytes_up, utility.plain_bytes_up),
    )


def _times(value: float | None, plain: float | None) -> str:
    return f", {value / plain:.2g} ×" if value is not None and plain else ""
