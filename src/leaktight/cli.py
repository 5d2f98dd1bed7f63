"""The command line. Exit codes: 0 done, 1 the work failed, 2 bad usage or config, 130 interrupted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from leaktight import __version__
from leaktight.core.errors import LeaktightError, UsageError

app = typer.Typer(
    name="leaktight",
    help="Measure what a federated-learning update gives away about its training data, and what each defense costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigArgument = Annotated[
    Path | None, typer.Argument(help="A TOML config. Without one, a built-in scenario on embedded data runs offline.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override a setting; may be repeated.")
]
DataRootOption = Annotated[
    Path | None,
    typer.Option("--data-root", help="Folder of downloaded data sets (default: $LEAKTIGHT_DATA, else a user cache)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, nothing else.")]


def main() -> None:
    """Run the command line; every known error is one line on stderr."""
    sys.path.insert(0, os.getcwd())  # a user's own module:function is found in the current folder
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        print("leaktight: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
    except LeaktightError as error:
        print(f"leaktight: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2 if isinstance(error, UsageError) else 1)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit()


@app.command()
def train(
    config: ConfigArgument = None,
    overrides: SetOption = None,
    defense: Annotated[str | None, typer.Option(help="A defense of the catalogue, with its defaults.")] = None,
    centralised: Annotated[
        bool, typer.Option("--centralised", help="Train on the pooled data: the reference without federation.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/train-NNN).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --out, or with the newest run of the same settings.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes for clients (default: one per core); no effect on numbers.")
    ] = None,
    data_root: DataRootOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the config, show who holds what, and stop.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Federated training: accuracy, loss, time and bytes of every round, a checkpoint after each.

    Example: leaktight train --set federation.rounds=50 --set partition.kind=iid
    """
    from leaktight.commands import run_training

    run_training(
        config,
        overrides or [],
        defense=defense,
        pooled=centralised,
        out=out,
        resume=resume,
        workers=workers,
        data_root=data_root,
        dry_run=dry_run,
        as_json=as_json,
    )


@app.command(name="list")
def list_entries(
    kind: Annotated[str, typer.Argument(help="datasets, partitions, models, aggregators, defenses, metrics ...")],
    as_json: JsonOption = False,
) -> None:
    """The names that a config and the options accept, with a line about each."""
    from leaktight.commands import print_entries

    print_entries(kind, as_json=as_json)


@app.command()
def data(
    name: Annotated[str | None, typer.Argument(help="A data set or weights; without one, all are listed.")] = None,
    data_root: DataRootOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the files that are there; fetch nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there but damaged.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch a data set with checksum and resume, or say exactly what to put where.

    Example: leaktight data mnist
    """
    from leaktight.commands import print_sources, run_fetch

    if name is None:
        print_sources(data_root, as_json=as_json)
    else:
        run_fetch(name, data_root, verify_only=verify, force=force, as_json=as_json)
