"""A recipe: a config with a table `[recipe]` that says what a publication claims, and how that is decided.

The other tables are the published setting, so that `leaktight audit recipe:NAME` runs it, too. A recipe has parts, each
a run with changed settings; scales, which change settings of all parts; a table of rows and columns, which choose
results of the parts; and claims, which compare places of that table. Published numbers are in a CSV file beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from leaktight.config.recipes import recipes
from leaktight.core.errors import ConfigError, UsageError, suggestion
from leaktight.reproductions.file import MAIN, published, spelt_out
from leaktight.results.schema import first_fault

ScaleName: TypeAlias = Literal["smoke", "cpu", "paper"]
SCALES: tuple[ScaleName, ...] = ("smoke", "cpu", "paper")

Paper: TypeAlias = Literal["outpost", "adadefense", "agic", "lrp", "thesis"]
PAPERS: Mapping[Paper, str] = {
    "outpost": "OUTPOST",
    "adadefense": "AdaDefense",
    "agic": "AGIC",
    "lrp": "LRP and ada-LRP",
    "thesis": "GRNN, FedBoosting and FedKL",
}

Relation: TypeAlias = Literal["above", "below", "near"]
Choice: TypeAlias = Mapping[str, str | bool | Mapping[str, str | float | bool]]
"""What a row or a column chooses: part, metric, attack, defense, adaptive, finished; see `measure.from_audit`.

percent_of: a row of which the value is given as a share, in percent. If a row and a column both name a part, as "MNIST"
and "batch 4", it is the part of both names, "MNIST batch 4", or where there is none that of the column. The part of a
column may contain "{row}", the part that the row names, or else its own name: where there is no such part, nothing is
run. If neither names a part, their own names do; a single part need not be named.
"""
_ROW = "{row}"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def _numbered(settings: tuple[str, ...]) -> tuple[str, ...]:
    """The settings, of which "attack.{0..2}.iterations=3" stands for three."""
    spelt: list[str] = []
    for each in settings:
        numbers = range(int(found[1]), int(found[2]) + 1) if (found := _RANGE.search(each)) else None
        spelt += [each] if numbers is None else [_RANGE.sub(str(number), each, count=1) for number in numbers]
    return tuple(spelt)


Settings: TypeAlias = Annotated[tuple[str, ...], AfterValidator(_numbered)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(_Table):
    """A run of a recipe.

    command: "audit", "train", or "module:function", called with the config and giving results by row and column.
    set: overrides of the config, "table.key=value", where {data} is the folder of data sets, {part} the name of the
    part, and {0..2} stands for three settings; `at`: further ones by scale, applied last. seeds: how many trainings,
    which differ in the seed alone. adaptive: whether an audit also tries attackers who know the defense; it has the
    defenses that its config names, and no others.
    """

    name: str = MAIN
    command: str = "audit"
    set: Settings = ()
    at: Mapping[ScaleName, Settings] = {}
    seeds: Annotated[int, Field(ge=1)] = 1
    adaptive: bool = True


class Scale(_Table):
    """Settings for machines of one kind.

    set: overrides for all parts. parts: those that are run, also "MNIST *"; empty for all. minutes: the expected time
    on two cores. seeds: trainings of a part, if fewer. differences: from the published setting, in words.
    """

    set: Settings = ()
    parts: tuple[str, ...] = ()
    minutes: float
    seeds: int | None = None
    differences: tuple[str, ...] = ()


class Place(_Table):
    """A place of the table."""

    row: str
    column: str

    def __str__(self) -> str:
        return f"{self.row}, {self.column}"


class Claim(_Table):
    """What a publication says, as comparisons that were written down before the run.

    says: in words. row, column: the place that is compared. than: the places it is compared with, of which a row or a
    column that is missing is the same; or a number. relation: "above", "below" or "near". times: the other value is
    multiplied by this first. by: the least difference; for "near", the largest.
    untestable: why the claim cannot be decided here; then it is compared with nothing.
    """

    says: str
    row: str = ""
    column: str = ""
    than: tuple[Mapping[Literal["row", "column"], str] | float, ...] = ()
    relation: Relation = "above"
    times: float = 1.0
    by: float = 0.0
    untestable: str = ""

    @property
    def left(self) -> Place:
        return Place(row=self.row, column=self.column)

    @property
    def right(self) -> list[Place | float]:
        return [
            each
            if isinstance(each, float)
            else Place(row=each.get("row", self.row), column=each.get("column", self.column))
            for each in self.than
        ]


class Recipe(_Table):
    """The table `[recipe]`. published: by row and column, the text of the CSV file's entry.

    each: what all own parts have, before their own settings.
    axes: parts as products: [recipe.axes.data] with "MNIST" = {set = [...]} and [recipe.axes.batch] with "4" = {...}
    make the part "MNIST 4", which has the settings of both, then those of an own part of this name.
    like: another recipe, whose config, parts and scales' settings this one has. use: its parts, by the names that they
    have here, or a list of names that they keep, also "MNIST *"; by default all if there are no own parts, else none.
    rows, columns: in a file also a list of names, for those that choose nothing but a part.
    where: the place in the publication. legacy: columns that follow a convention of the publication's code, which are
    only shown. least: the number of victims or seeds that a claim needs.
    """

    name: str
    path: Path
    paper: Paper
    where: str
    title: str
    like: str = ""
    use: Mapping[str, str] = {}
    each: Mapping[str, Any] = {}
    axes: Mapping[str, Mapping[str, Mapping[str, Any]]] = {}
    parts: tuple[Part, ...] = (Part(),)
    rows: Mapping[str, Choice]
    columns: Mapping[str, Choice]
    scales: Mapping[ScaleName, Scale]
    claims: tuple[Claim, ...]
    least: int = 10
    legacy: tuple[str, ...] = ()
    figure: Literal["none", "pictures", "curves", "points", "lines"] = "none"
    notes: str = ""
    published: Mapping[str, Mapping[str, str]] = {}

    @property
    def source(self) -> str:
        return f"{PAPERS[self.paper]}, {self.where}"

    def scale(self, name: ScaleName) -> Scale:
        if name not in self.scales:
            raise UsageError(f"{self.name} has no scale {name}; it has {', '.join(self.scales)}")
        return self.scales[name]

    def choice(self, place: Place) -> dict[str, object]:
        """What is measured at a place: the choices of its row and of its column."""
        row, column = self.rows[place.row], self.columns[place.column]
        parts = [each.name for each in self.parts]
        if named := [str(choice["part"]) for choice in (row, column) if "part" in choice]:
            part = both if (both := " ".join(named)) in parts else named[-1]
        else:
            own = (f"{place.row} {place.column}", place.column, place.row)
            part = next((name for name in own if name in parts), parts[0] if len(parts) == 1 else own[0])
        return {**row, **column, "part": part.replace(_ROW, str(row.get("part", place.row)))}

    def places(self) -> Iterator[Place]:
        for row in self.rows:
            for column in self.columns:
                yield Place(row=row, column=column)


def reproducible() -> list[str]:
    """The names of the recipes that have claims."""
    return [name for name, path in recipes().items() if "\n[recipe]" in path.read_text(encoding="utf-8")]


def read_recipe(name: str) -> Recipe:
    """The recipe of this name; a UsageError names the nearest one, a ConfigError the wrong line."""
    if name not in (known := reproducible()):
        raise UsageError(f"no recipe {name!r}; {suggestion(name, known)}")
    path = recipes()[name]
    table = spelt_out(path)
    try:
        recipe = Recipe(name=name, path=path, published=published(path.with_suffix(".csv")), **table)
    except (ValidationError, TypeError) as error:
        fault = first_fault(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{path}: [recipe] {fault}") from error
    _check(recipe)
    return recipe


def _check(recipe: Recipe) -> None:
    """Raise ConfigError where a claim, a choice or a published number names what is not there."""
    parts = [part.name for part in recipe.parts]
    known = {"row": list(recipe.rows), "column": list(recipe.columns), "part": parts}

    def require(kind: str, name: str, where: str) -> None:
        if name not in known[kind]:
            raise ConfigError(f"{recipe.path}: {where}: no {kind} {name!r}; {suggestion(name, known[kind])}")

    for place in recipe.places():
        choice = recipe.choice(place)
        if "percent_of" in choice:
            require("row", str(choice["percent_of"]), f"{place}")
        if _ROW in str(recipe.columns[place.column].get("part")):
            continue  # an entry that no part makes is empty
        require("part", str(choice["part"]), f"{place}")
    for scale, settings in recipe.scales.items():
        for part in settings.parts:
            require("part", part, f"[recipe.scales.{scale}]")
    for claim in recipe.claims:
        if claim.untestable:
            continue
        if not claim.than:
            raise ConfigError(f"{recipe.path}: claim {claim.says!r}: expected something to compare with, `than`")
        for each in [claim.left, *claim.right]:
            if isinstance(each, Place):
                require("row", each.row, f"claim {claim.says!r}")
                require("column", each.column, f"claim {claim.says!r}")
    for row, entries in recipe.published.items():
        require("row", row, f"{recipe.path.stem}.csv")
        for column in entries:
            require("column", column, f"{recipe.path.stem}.csv")
