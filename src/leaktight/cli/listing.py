"""`leaktight list`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from leaktight.cli import options
from leaktight.config.names import ENTRIES
from leaktight.core.errors import UsageError, suggestion

if TYPE_CHECKING:
    from leaktight.config.details import Details

HELP = f"""List the names that configs and options accept, or all about one of them.

KIND is one of {", ".join(ENTRIES)}; without it, the kinds are listed. NAME is one of that kind: its settings with
defaults and meaning, what it assumes, its source, and a table for a config.

Examples: leaktight list threats; leaktight list defenses outpost
"""


def command(
    kind: Annotated[str | None, typer.Argument(help="What to list; without it, the kinds.")] = None,
    name: Annotated[str | None, typer.Argument(help="One of them, to show all about it.")] = None,
    as_json: options.Json = False,
) -> None:
    from leaktight.cli.console import print_json, print_table

    if kind is None:
        document: dict[str, object] = {"kinds": {each: list(names) for each, names in ENTRIES.items()}}
        columns, rows = ("kind", "names"), [(each, ", ".join(names)) for each, names in ENTRIES.items()]
    elif kind not in ENTRIES:
        raise UsageError(f"nothing to list under {kind!r}; {suggestion(kind, ENTRIES)}")
    elif name is None:
        columns, rows = ("name", "description"), [(each, entry.description) for each, entry in ENTRIES[kind].items()]
        document = {"kind": kind, "entries": [dict(zip(columns, row, strict=True)) for row in rows]}
    else:
        from leaktight.config.details import details

        found = details(kind, name)
        document = {"kind": kind, **asdict(found)}
        if not as_json:
            _show(found)
            return
    if as_json:
        print_json({"schema_version": 1, **document})
    else:
        print_table(columns, rows)


def _show(found: Details) -> None:
    """All about one method, as text."""
    from leaktight.cli.console import print_table, print_text

    print_text(f"{found.name}: {found.description}")
    for label, text in found.notes.items():
        print_text(f"{label}: {text}" if label else text)
    if found.settings:
        rows = [(each.name, _default(each.default), each.meaning or each.kind) for each in found.settings]
        print_table(("setting", "default", "meaning"), rows)
    if found.example:
        print_text(f"\nIn a config:\n\n{found.example.rstrip()}")


def _default(default: str | None) -> str:
    return "(needed)" if default is None else default or "-"
