"""The command line. Exit codes: 0 success, 1 failure, 2 bad usage or config, 3 a leak (--fail-on), 130 interrupted.

Slow modules are imported when a command runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn

import typer

from leaktight import __version__
from leaktight.cli import (
    audit,
    data,
    docs,
    flower,
    generator,
    inspect,
    leaderboard,
    listing,
    report,
    reproduce,
    train,
    verify,
)
from leaktight.cli.help import Command, Group
from leaktight.core.errors import LeakFoundError, LeaktightError, StoppedError, UsageError
from leaktight.core.faults import fault_of
from leaktight.core.text import printable
from leaktight.runtime.allocator import keep_freed

HELP = """Measure what federated-learning updates leak about training data, and what each defense costs.

Example: leaktight audit --attack csdlg --defense outpost --trials 1
"""
_LONGEST = 2000

app = typer.Typer(
    name="leaktight",
    cls=Group,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=Command)(train.command)
app.command("audit", cls=Command, help=audit.AUDIT_HELP)(audit.command)
app.command("tradeoff", cls=Command, help=audit.TRADEOFF_HELP)(audit.command)
app.command("inspect", cls=Command)(inspect.command)
app.command("reproduce", cls=Command, help=reproduce.HELP)(reproduce.command)
app.command("report", cls=Command)(report.command)
app.command("verify", cls=Command)(verify.command)
app.add_typer(leaderboard.app, name="leaderboard")
app.command("list", cls=Command, help=listing.HELP)(listing.command)
app.command("data", cls=Command)(data.command)
app.command("docs", cls=Command)(docs.command)
app.add_typer(generator.app, name="generator")
app.add_typer(flower.app, name="flower")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit()


def _one_line(text: str) -> str:
    """The text of an error for a terminal; a very long one keeps its start and its end, which says what to do."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return printable(text, len(text))


def main() -> None:
    """Run the command line. Errors of Leaktight and faults of the machine are printed as one line on stderr."""
    sys.path.insert(0, os.getcwd())  # so that a user's "module:name" is found in the current folder
    keep_freed()
    try:
        with _stopped_by("SIGTERM", "SIGHUP", "SIGXCPU"):
            app(standalone_mode=True)
    except StoppedError as error:
        _end(f"ended by {error}; what is done is kept, continue with --resume", 1)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except LeaktightError as error:
        _end(str(error), 2 if isinstance(error, UsageError) else 3 if isinstance(error, LeakFoundError) else 1)
    except Exception as error:
        fault = fault_of(error)
        if fault is None:
            raise
        _end(str(fault), 1)


@contextmanager
def _stopped_by(*names: str) -> Iterator[None]:
    """Raise StoppedError on these signals, if the system has them and nobody else has said what they do."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise StoppedError(signal.Signals(number).name)

    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    free = [number for number in known if signal.getsignal(number) == signal.SIG_DFL]
    for number in free:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in free:
            signal.signal(number, signal.SIG_DFL)


def _end(message: str, code: int) -> NoReturn:
    print(f"leaktight: {_one_line(message)}", file=sys.stderr)  # noqa: T201
    sys.exit(code)
