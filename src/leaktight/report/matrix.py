"""The matrix of attacks and defenses of one track, and the pictures of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaktight.report.pictures import Pair
from leaktight.report.words import Level
from leaktight.results.schema import UNDEFENDED, Cell, Threat, Trial, Verdict, Word

MOST = 0.5
"""The least share of leaked trials for an attack to count as working, in files without verdicts on attackers."""


@dataclass(frozen=True)
class Column:
    """A column of the matrix: an attack and its threat model."""

    attack: str
    adaptive: bool
    role: str
    threat: Threat


@dataclass(frozen=True, kw_only=True)
class MatrixField:
    """A field of the matrix. doubtful: nothing leaked, but the attack also fails without a defense.

    among: how many candidates the victim was picked out of, if it was tried.
    """

    column: Column
    cell: Cell | None
    level: Level
    doubtful: bool = False
    among: int | None = None
    anchor: str | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The pictures of one attack on one defense. total: how many there are, shown or not."""

    anchor: str
    column: Column
    cell: Cell
    level: Level
    pairs: tuple[Pair, ...]
    total: int


def column_of(cell: Cell) -> Column:
    return Column(cell.attack, cell.adaptive, cell.role, cell.threat)


def columns_of(cells: Sequence[Cell]) -> tuple[Column, ...]:
    """Attacks in the order of the run, then negative controls."""
    columns = dict.fromkeys(column_of(cell) for cell in cells)
    return tuple(sorted(columns, key=lambda column: column.role == "control"))


def undefended_of(cells: Sequence[Cell]) -> dict[str, Cell]:
    """The undefended cell of each attack, by its name; an adaptive attack has the same name as the plain one."""
    return {cell.attack: cell for cell in cells if cell.defense == UNDEFENDED and cell.role == "attack"}


Judged = Mapping[tuple[str, Column], Word]
"""What the verdicts say about each attack on each defense."""


def judged_of(verdicts: Sequence[Verdict]) -> Judged:
    return {
        (entry.defense, Column(each.attack, each.adaptive, "attack", each.threat)): each.verdict
        for entry in verdicts
        for each in entry.attackers
    }


def level_of(cell: Cell, undefended: Cell | None) -> tuple[Level, bool]:
    """The colour of a field without a verdict, and whether it is doubtful: the attack also fails without a defense.

    undefended: the same attack without a defense; None if it was not run, so that the attack may not work at all.
    """
    if cell.role == "control":
        return "control", False
    if cell.success_rate is None or not cell.done:
        return "unknown", False
    if cell.success_rate >= MOST:
        return "reconstructed", False
    if cell.leaked:
        return "identified", False
    if undefended is None:
        return "cannot-conclude", False
    doubtful = (undefended.success_rate or 0) < MOST
    return ("cannot-conclude" if doubtful else "nothing-found"), doubtful


def field_of(
    cell: Cell | None, column: Column, judged: Judged, undefended: Mapping[str, Cell], trials: Sequence[Trial]
) -> MatrixField:
    """One field. trials: of the cell."""
    if cell is None:
        return MatrixField(column=column, cell=None, level="unknown")
    level, doubtful = level_of(cell, undefended.get(column.attack))
    if (cell.defense, column) in judged:
        level, doubtful = judged[cell.defense, column], False
    among = max((trial.rank.decoys + 1 for trial in trials if trial.rank is not None), default=None)
    return MatrixField(column=column, cell=cell, level=level, doubtful=doubtful, among=among)
