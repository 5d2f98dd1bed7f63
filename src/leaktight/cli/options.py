"""The arguments and options that several commands share, and their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Config: TypeAlias = Annotated[
    Path | None, typer.Argument(help="A TOML config. Without one, a built-in scenario on embedded data runs offline.")
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
    typer.Option("--defense", metavar="KIND", help="A defense of the catalogue, or MODULE:CLASS; each by itself."),
]
Stacked: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--defense", metavar="KIND", help="A defense of the catalogue, or MODULE:CLASS; several are stacked."),
]
Out: TypeAlias = Annotated[Path | None, typer.Option("--out", help="The run's folder (default: runs/COMMAND-NNN).")]
Resume: TypeAlias = Annotated[
    bool, typer.Option("--resume", help="Go on with --out, or with the newest run of the same settings.")
]
Workers: TypeAlias = Annotated[
    str | None,
    typer.Option("--workers", metavar="N|ray[://HOST:PORT]", help="Processes (default: one per core; 0: this one)."),
]
DataRoot: TypeAlias = Annotated[
    Path | None,
    typer.Option("--data-root", help="Folder of downloaded data sets (default: $LEAKTIGHT_DATA, else a user cache)."),
]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would run, and stop.")]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, nothing else.")
]
