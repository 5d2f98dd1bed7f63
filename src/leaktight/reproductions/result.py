"""`result.json`: what one recipe gave at one scale. The pages are made from it."""

from __future__ import annotations

from typing import Literal

from leaktight.reproductions.recipe import Paper, ScaleName
from leaktight.reproductions.rules import Decision
from leaktight.results.schema import Figure, Record, Version


class Entry(Record):
    """A place of the table. published: as printed. number: of victims or seeds with a valid value."""

    row: str
    column: str
    published: str = ""
    mean: Figure = None
    low: Figure = None
    high: Figure = None
    number: int = 0


class ClaimResult(Record):
    """A claim, the decision, and the comparisons behind it. rule: what was compared, written before the run.

    undecided: it could be tested, but the intervals are on both sides of the rule.
    """

    says: str
    rule: str
    decision: Decision
    because: str
    undecided: bool = False

    @property
    def verdict(self) -> str:
        """The decision, and whether more victims or seeds could change it."""
        return f"{self.decision} (undecided)" if self.undecided else self.decision


class RunUsed(Record):
    """A run behind the result. digest: of its settings; runs with the same digest are shared between recipes."""

    part: str
    command: str
    digest: str
    seed: int | None = None
    minutes: float


class Reproduction(Record):
    """What a recipe gave. differences: from the published setting. legacy: columns that follow a published code."""

    schema_version: Version
    recipe: str
    scale: ScaleName
    paper: Paper
    where: str
    title: str
    kind: Literal["victims", "seeds"]
    differences: tuple[str, ...]
    notes: str = ""
    legacy: tuple[str, ...] = ()
    entries: tuple[Entry, ...]
    claims: tuple[ClaimResult, ...]
    runs: tuple[RunUsed, ...]
    leaktight: str
    torch: str
