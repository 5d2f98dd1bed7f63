"""The command line. Exit codes: 0 success, 1 failure, 2 bad usage or config, 3 a leak (--fail-on), 130 interrupted.

Slow modules are imported when a command runs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from leaktight import __version__
from leaktight.cli import audit, data, flower, generator, inspect, leaderboard, listing, report, train, verify
from leaktight.core.errors import LeakFoundError, LeaktightError, UsageError
from leaktight.core.text import printable

_LONGEST = 2000

app = typer.Typer(
    name="leaktight",
    help="Measure what federated-learning updates leak about training data, and what each defense costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.command)
app.command("audit", help=audit.AUDIT_HELP)(audit.command)
app.command("tradeoff", help=audit.TRADEOFF_HELP)(audit.command)
app.command("inspect")(inspect.command)
app.command("report")(report.command)
app.command("verify")(verify.command)
app.add_typer(leaderboard.app, name="leaderboard")
app.command("list", help=listing.HELP)(listing.command)
app.command("data")(data.command)

generators = typer.Typer(no_args_is_help=True, help="Image generators for the attacks ggl and gias.")
generators.command("train")(generator.command)
app.add_typer(generators, name="generator")

flowers = typer.Typer(no_args_is_help=True, help="Leaktight in a Flower federation.")
flowers.command("export")(flower.command)
app.add_typer(flowers, name="flower")


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
    """Run the command line. Errors of Leaktight are printed as one line on stderr."""
    sys.path.insert(0, os.getcwd())  # so that a user's "module:name" is found in the current folder
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        print("leaktight: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
    except LeaktightError as error:
        print(f"leaktight: {_one_line(str(error))}", file=sys.stderr)  # noqa: T201
        sys.exit(2 if isinstance(error, UsageError) else 3 if isinstance(error, LeakFoundError) else 1)
