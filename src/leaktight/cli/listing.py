"""`leaktight list`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from leaktight.cli import options
from leaktight.config.names import ENTRIES
from leaktight.config.recipes import about, recipes
from leaktight.core.errors import UsageError, suggestion

if TYPE_CHECKING:
    from leaktight.config.details import Details

RECIPES = "recipes"
KINDS = (*ENTRIES, RECIPES)
HELP = f"""List the names that configs and options accept, or all about one of them.

KIND is one of {", ".join(KINDS)}; without it, the kinds are listed. NAME is one of that kind: its settings with
defaults and meaning, what it assumes, its source, and a table for a config; the whole config of a recipe.

Example: leaktight list threats

Example: leaktight list defenses outpost
"""


def command(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help="What to list; without it, the kinds.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One of them, to show all about it.")] = None,
    as_json: options.Json = False,
) -> None:
    from leaktight.cli.console import print_json, print_table

    if kind is None:
        listed = {each: list(_entries(each)) for each in KINDS}
        document: dict[str, object] = {"kinds": listed}
        columns, rows = ("kind", "names"), [(each, ", ".join(names)) for each, names in listed.items()]
    elif kind not in KINDS:
        raise UsageError(f"nothing to list under {kind!r}; {suggestion(kind, KINDS)}")
    elif name is None:
        columns, rows = ("name", "description"), list(_entries(kind).items())
        document = {"kind": kind, "entries": [dict(zip(columns, row, strict=True)) for row in rows]}
    else:
        from leaktight.config.details import details, recipe_details

        found = recipe_details(name) if kind == RECIPES else details(kind, name)
        document = {"kind": kind, **asdict(found)}
        if not as_json:
            _show(found, "The config" if kind == RECIPES else "In a config")
            return
    if as_json:
        print_json({"schema_version": 1, **document})
    else:
        print_table(columns, rows)


def _entries(kind: str) -> dict[str, str]:
    """The names of a kind with what each is."""
    if kind == RECIPES:
        return {name: about(file) for name, file in recipes().items()}
    return {name: entry.description for name, entry in ENTRIES[kind].items()}


def _show(found: Details, heading: str) -> None:
    """All about one method or recipe, as text. heading: of its example."""
    from rich.console import Console

    from leaktight.cli.console import print_table, print_text, say

    print_text(f"{found.name}: {found.description}")
    for label, text in found.notes.items():
        print_text(f"{label}: {text}" if label else text)
    if found.settings:
        rows = [(each.name, _default(each.default), each.meaning or each.kind) for each in found.settings]
        print_table(("setting", "default", "meaning"), rows)
        print_text("")
    if found.example:
        say(Console(), f"{heading}:\n\n{found.example.rstrip()}\n")


def _default(default: str | None) -> str:
    return "(needed)" if default is None else default or "-"
