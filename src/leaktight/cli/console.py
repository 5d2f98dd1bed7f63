"""Printing of all commands. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leaktight.core.errors import StoppedError
from leaktight.core.faults import fault_of
from leaktight.core.files import without_secrets
from leaktight.core.text import shown


def print_json(document: object) -> None:
    print(json.dumps(document, indent=1))  # noqa: T201


def print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    Console().print(table, highlight=False)


def print_text(text: str) -> None:
    """A paragraph of plain text, broken at words."""
    Console().print(text, highlight=False, markup=False, end="\n\n")


def say(console: Console, text: str) -> None:
    """Print plain text without markup, colours, line breaks of its own or what a terminal would obey."""
    console.print(shown(text), highlight=False, markup=False, soft_wrap=True)


def called() -> str:
    """The command line, without a secret key."""
    return shlex.join(["leaktight", *without_secrets(sys.argv[1:])])


@contextmanager
def resumable(path: Path, console: Console) -> Iterator[None]:
    """If the run in `path` is interrupted, or the machine fails, print the command that continues it."""
    try:
        yield
    except (KeyboardInterrupt, StoppedError, Exception) as error:
        if isinstance(error, Exception) and fault_of(error) is None:
            raise
        from leaktight.results.folder import RunFolder  # slow to import for commands without a run

        file = RunFolder(path).command
        call = file.read_text().splitlines()[-1] if file.exists() else called()  # the last one has all settings
        say(console, f"stopped; continue with: {resume_command(call, path)}")
        raise


def resume_command(call: str, path: Path) -> str:
    """The call with the options that continue the run in `path`.

    >>> resume_command("leaktight audit --resume", Path("runs/a"))
    'leaktight audit --resume --out runs/a'
    """
    words = [word for word in shlex.split(call) if word not in ("--resume", "--retry-failed")]
    out = [] if "--out" in words else ["--out", str(path)]
    return shlex.join([*words, "--resume", *out])
