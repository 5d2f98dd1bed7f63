"""`leaktight generator train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from leaktight.cli import options
from leaktight.cli.help import Command, Group
from leaktight.config.tables import read_tables

HELP = """Image generators for the attacks ggl and gias.

Example: leaktight generator train --data digits --epochs 1 --out digits.safetensors
"""
app = typer.Typer(cls=Group, no_args_is_help=True, help=HELP)


@app.callback()
def group() -> None:
    """Keeps `train` a command of its own."""


@app.command("train", cls=Command)
def command(
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="The weights; samples go to FILE.png.")],
    config: options.Config = None,
    overrides: options.Set = None,
    data: Annotated[
        str | None, typer.Option(metavar="KIND", help="One of `leaktight list datasets` (default: the config's).")
    ] = None,
    size: Annotated[int | None, typer.Option(min=8, help="Pixels per side, if the data set can be scaled.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(metavar="dcgan|wgan_gp", help="Training method; wgan_gp is slower and rarely collapses."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the images (default: 3000 steps).")] = None,
    batch_size: Annotated[int | None, typer.Option(min=2, help="Images per step (default: 32).")] = None,
    latent: Annotated[int | None, typer.Option(min=1, help="Length of the latent vector (default: 64).")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Channels of the last hidden layer (default: 32).")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    data_root: options.DataRoot = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train a small image generator for the attacks ggl and gias on public images.

    Public images are those of the TEST part of the data set that clients, and so victims, do not hold.

    Use the config of the audit, or the same data settings, so that the test part is the same. The file records them.

    For more public images, if the data set has no fixed test part: --set data.test_share=0.5, here and in the audit.

    Example: leaktight generator train --data digits --out digits.safetensors
    """
    named = [*([f"data.kind={data}"] if data else []), *([f"data.size={size}"] if size else []), *(overrides or [])]
    read_tables(config, named)  # report errors before slow imports
    from leaktight.api.generator import plan
    from leaktight.cli.generator_display import run
    from leaktight.config.settings import load_config
    from leaktight.config.toml import build
    from leaktight.models.gan_training import GanTraining

    options_given = {"kind": kind, "epochs": epochs, "batch_size": batch_size, "latent": latent, "width": width}
    given = {name: value for name, value in options_given.items() if value is not None}
    training = build(GanTraining, given, "generator train", "options")
    resolved = load_config(config, named)
    if data_root is not None:
        resolved = replace(resolved, data_root=data_root)
    run(plan(resolved, training, out, seed=seed, force=force), as_json=as_json)
