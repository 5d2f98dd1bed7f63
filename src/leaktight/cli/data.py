"""`leaktight data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaktight.cli import options


def command(
    name: Annotated[str | None, typer.Argument(help="A data set or weights (default: list all).")] = None,
    data_root: options.DataRoot = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the existing files; download nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace damaged files.")] = False,
    as_json: options.Json = False,
) -> None:
    """Download a data set and check it, or say which files to put where.

    Example: leaktight data mnist
    """
    from leaktight.data import dataset

    root = dataset.data_root(data_root)
    if name is None:
        _list(root, as_json=as_json)
    else:
        _fetch(name, root, verify=verify, force=force, as_json=as_json)


def _list(root: Path, *, as_json: bool) -> None:
    from rich.console import Console

    from leaktight.cli.console import print_json, print_table, say
    from leaktight.data import sources
    from leaktight.data.published import SOURCES

    states = {name: "present" if sources.present(name, root) else "missing" for name in SOURCES}
    if as_json:
        rows = [
            {"name": name, "state": state, "folder": str(root / SOURCES[name].folder)} for name, state in states.items()
        ]
        print_json({"schema_version": 1, "root": str(root), "sources": rows})
        return
    say(Console(), f"data root: {root}")
    print_table(
        ("name", "state", "description"), [(name, state, SOURCES[name].description) for name, state in states.items()]
    )


def _fetch(name: str, root: Path, *, verify: bool, force: bool, as_json: bool) -> None:
    from rich.console import Console

    from leaktight.cli.console import print_json, say
    from leaktight.cli.display import DownloadDisplay
    from leaktight.core.errors import DataError
    from leaktight.data import sources

    if verify:
        report = sources.verify(name, root)
    else:
        with DownloadDisplay(Console(stderr=True)) as display:
            report = sources.prepare(name, root, force=force, progress=display.file_progress)
    if as_json:
        document = {"name": name, "state": report.state, "folder": str(report.folder), "message": report.message}
        print_json({"schema_version": 1, **document})
    elif report.usable:
        say(Console(), report.message)
    if not report.usable:
        raise DataError(report.message)
