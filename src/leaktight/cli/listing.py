"""`leaktight list`."""

from __future__ import annotations

from typing import Annotated

import typer

from leaktight.cli import options
from leaktight.config.names import ENTRIES
from leaktight.core.errors import UsageError, suggestion

HELP = f"""List the names that configs and options accept, with a description of each.

KIND is one of {", ".join(ENTRIES)}.

Example: leaktight list threats
"""


def command(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(ENTRIES)}.")], as_json: options.Json = False
) -> None:
    from leaktight.cli.console import print_json, print_table

    if kind not in ENTRIES:
        raise UsageError(f"nothing to list under {kind!r}; {suggestion(kind, ENTRIES)}")
    entries = {name: entry.description for name, entry in ENTRIES[kind].items()}
    if as_json:
        rows = [{"name": name, "description": text} for name, text in entries.items()]
        print_json({"schema_version": 1, "kind": kind, "entries": rows})
        return
    print_table(("name", "description"), list(entries.items()))
