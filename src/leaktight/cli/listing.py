"""`leaktight list`."""

from __future__ import annotations

from leaktight.cli.console import print_json, print_table
from leaktight.config.names import ENTRIES
from leaktight.core.errors import UsageError, suggestion


def print_entries(kind: str, *, as_json: bool) -> None:
    """`leaktight list`."""
    if kind not in ENTRIES:
        raise UsageError(f"nothing to list under {kind!r}; {suggestion(kind, ENTRIES)}")
    entries = {name: entry.description for name, entry in ENTRIES[kind].items()}
    if as_json:
        rows = [{"name": name, "description": text} for name, text in entries.items()]
        print_json({"schema_version": 1, "kind": kind, "entries": rows})
        return
    print_table(("name", "description"), list(entries.items()))
