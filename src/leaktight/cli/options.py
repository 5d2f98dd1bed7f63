"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Config: TypeAlias = Annotated[
    Path | None, typer.Argument(help="A TOML config (default: a built-in scenario that needs no download).")
]
Set: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override a setting; may be repeated.")
]
Attacks: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--attack", metavar="KIND", help="An attack of the catalogue, or MODULE:CLASS; may be repeated."),
]
Defenses: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--defense", metavar="KIND", help="A defense of the catalogue, or MODULE:CLASS; each is tried alone."),
]
Stacked: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--defense", metavar="KIND", help="A defense of the catalogue, or MODULE:CLASS; several are stacked."),
]
Out: TypeAlias = Annotated[Path | None, typer.Option("--out", help="The run's folder (default: runs/COMMAND-NNN).")]
Resume: TypeAlias = Annotated[
    bool, typer.Option("--resume", help="Continue the run in --out, or the newest run with the same settings.")
]
Workers: TypeAlias = Annotated[
    str | None,
    typer.Option("--workers", metavar="N|ray[://HOST:PORT]", help="Processes (default: one per core; 0: this one)."),
]
DataRoot: TypeAlias = Annotated[
    Path | None,
    typer.Option("--data-root", help="Folder of downloaded data sets (default: $LEAKTIGHT_DATA or a user cache)."),
]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, and stop.")]
FailOn: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="LEVEL",
        help="Exit with code 3 if a defense leaks so much or more: reconstructed, identified or labels.",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print only a JSON document on standard output.")]
