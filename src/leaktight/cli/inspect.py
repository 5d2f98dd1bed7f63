"""`leaktight inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import typer

from leaktight.cli import options
from leaktight.config.fields import check_tables
from leaktight.config.tables import overridden
from leaktight.core.errors import UsageError
from leaktight.core.scope import checked_shape, not_supported

N = TypeVar("N", int, float)

Model: TypeAlias = Annotated[
    str, typer.Option(metavar="NAME|MODULE:FUNCTION", help="The network: one of `leaktight list models`, or your own.")
]
Before: TypeAlias = Annotated[
    Path, typer.Option(help="The model that the client received: .pt, .pth, .safetensors or .npz.")
]
Shape: TypeAlias = Annotated[str, typer.Option(metavar="C,H,W", help="The size of one image.")]
After: TypeAlias = Annotated[Path | None, typer.Option(help="The model that the client sent back.")]
Change: TypeAlias = Annotated[Path | None, typer.Option(help="The update, instead of --after; see --kind.")]
Kind: TypeAlias = Annotated[
    Literal["delta", "gradient"] | None, typer.Option(help="Type of --update: delta is after minus before.")
]
Classes: TypeAlias = Annotated[int | None, typer.Option(help="Number of classes (default: rows of the last layer).")]
Mean: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="M[,M,M]", help="Mean of images in [0, 1], if normalised outside of the network."),
]
Std: TypeAlias = Annotated[str | None, typer.Option(metavar="S[,S,S]", help="The network received (x - mean) / std.")]
BatchSize: TypeAlias = Annotated[int | None, typer.Option(help="Examples behind the update (default: 1).")]
Labels: TypeAlias = Annotated[
    str | None, typer.Option(metavar="L[,L...]", help="Their labels, if the attacker knows them.")
]
Local: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Local training: learning_rate, epochs or steps, batch_size, momentum ..."),
]
Mode: TypeAlias = Annotated[
    Literal["train", "eval"] | None, typer.Option(help="Mode of batch normalisation and dropout (default: train).")
]
Truth: TypeAlias = Annotated[
    Path | None, typer.Option(help="The true images, for scoring: a picture, a folder of pictures or an .npz.")
]

Decoys: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER|FILE|DATASET",
        help="Images like the true ones, to compare with: pictures, an .npz, or one of `leaktight list datasets`.",
    ),
]
Defenses: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--defense", metavar="KIND", help="What the client did to the update; the attacker then knows it."),
]


def command(
    model: Model,
    before: Before,
    shape: Shape,
    after: After = None,
    update: Change = None,
    kind: Kind = None,
    classes: Classes = None,
    mean: Mean = None,
    std: Std = None,
    batch_size: BatchSize = None,
    labels: Labels = None,
    local: Local = None,
    mode: Mode = None,
    attack: options.Attacks = None,
    truth: Truth = None,
    decoys: Decoys = None,
    defense: Defenses = None,
    overrides: options.Set = None,
    out: options.Out = None,
    resume: options.Resume = False,
    retry_failed: options.RetryFailed = False,
    workers: options.Workers = None,
    device: options.Device = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Attack a captured update: what can be reconstructed from it?

    Example: leaktight inspect --model net:build --before a.pt --after b.pt --shape 1,28,28
    """
    sizes = checked_shape(_numbers(shape, "--shape", int))
    averages, deviations = _numbers(mean, "--mean", float), _numbers(std, "--std", float)
    known = None if labels is None else _classes(labels)
    settings = [*(f"local.{each}" for each in local or ()), *(overrides or ()), *options.on(device)]
    tables = overridden(
        {"model": {"kind": model}, "local": {}}, settings, {"attack": attack or (), "defense": defense or ()}
    )
    check_tables(tables, "inspect")  # report errors before slow imports
    from rich.console import Console

    from leaktight.api.inspect import plan
    from leaktight.api.runs import parse_workers
    from leaktight.cli.audit_display import run_and_print
    from leaktight.cli.forecast_display import show_forecast, warn
    from leaktight.cli.inspect_display import announce, print_inspection

    parse_workers(workers)
    planned = plan(
        model,
        before,
        shape=sizes,
        after=after,
        update=update,
        kind=kind,
        classes=classes,
        mean=averages,
        std=deviations,
        mode=mode,
        batch_size=batch_size,
        labels=known,
        attacks=attack or (),
        truth=truth,
        decoys=decoys,
        defenses=defense or (),
        settings=settings,
    )
    announce(planned.prepared, Console(stderr=True))
    if dry_run:
        show_forecast(planned.forecast(workers), as_json=as_json)
    else:
        warn(planned.doubts(workers))
        run_and_print(
            planned,
            print_inspection,
            out=out,
            resume=resume,
            retry_failed=retry_failed,
            workers=workers,
            as_json=as_json,
        )


def _classes(text: str) -> list[int]:
    numbers = _numbers(text, "--labels", float)
    if any(not number.is_integer() for number in numbers):
        raise UsageError(not_supported("regression (labels are no integers)", "give the number of each class"))
    return [int(number) for number in numbers]


def _numbers(text: str | None, option: str, kind: type[N]) -> list[N]:
    """Numbers separated by commas.

    >>> _numbers("3,32,32", "--shape", int)
    [3, 32, 32]
    """
    try:
        return [] if text is None else [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"expected {option} to be numbers separated by commas, got {text!r}") from None
