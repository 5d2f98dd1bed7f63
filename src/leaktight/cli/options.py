"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

Config: TypeAlias = Annotated[
    Path | None,
    typer.Argument(help="A TOML config, or recipe:NAME (default: a built-in scenario that needs no download)."),
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
Trials: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--trials",
        metavar="N|auto",
        help="Victims for each attack on each defense (default: auto, 5, and 20 or more where 5 do not decide).",
    ),
]
Confidence: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--confidence",
        metavar="SHARE",
        help='The share of victims that "nothing found" has to stay below (default: 0.15).',
    ),
]
Budget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="quick|standard|thorough|MINUTES",
        help="The effort of the attack auto; or minutes after which no trial starts, --resume goes on.",
    ),
]
Out: TypeAlias = Annotated[Path | None, typer.Option("--out", help="The run's folder (default: runs/COMMAND-NNN).")]
Resume: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue the run in --out, or the newest one; it grows by more --trials, --attack ..."
    ),
]
RetryFailed: TypeAlias = Annotated[
    bool, typer.Option("--retry-failed", help="With --resume: repeat trials that ended in an error.")
]
Workers: TypeAlias = Annotated[
    str | None,
    typer.Option("--workers", metavar="N|ray[://HOST:PORT]", help="Processes (default: one per core; 0: this one)."),
]
Device: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="auto|cpu|cuda|mps", help="Where models and attacks run (default: cpu); also cuda:1."
    ),
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


def number(text: str | None) -> float | str | None:
    """The text as a number, if it is one.

    >>> number("10"), number("quick")
    (10.0, 'quick')
    """
    try:
        return text if text is None else float(text)
    except ValueError:
        return text


def numbers(texts: Mapping[str, str | None]) -> dict[str, Any]:
    """The options that were given, as numbers where they are some.

    >>> numbers({"trials": "10", "confidence": None})
    {'trials': 10}
    """
    given = {name: number(text) for name, text in texts.items() if text is not None}
    return {name: int(each) if isinstance(each, float) and each.is_integer() else each for name, each in given.items()}


def on(device: str | None) -> list[str]:
    """The option `--device` as an override.

    >>> on("cuda:1"), on(None)
    (['device=cuda:1'], [])
    """
    return [] if device is None else [f"device={device}"]


def asked(**settings: str | None) -> list[str]:
    """Settings of `[audit]` that are options of the command line, as overrides.

    >>> asked(trials="auto", confidence=None)
    ['audit.trials=auto']
    """
    return [f"audit.{name}={value}" for name, value in settings.items() if value is not None]
