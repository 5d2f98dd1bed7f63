"""`leaktight generator train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from leaktight.cli import options


def command(
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="Where the weights go; samples beside, .png.")],
    config: options.Config = None,
    overrides: options.Set = None,
    data: Annotated[
        str | None, typer.Option(metavar="KIND", help="One of `leaktight list datasets` (default: the config's).")
    ] = None,
    size: Annotated[int | None, typer.Option(min=8, help="Pixels a side, where the data set can be scaled.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(metavar="dcgan|wgan_gp", help="The game; the second is slower and seldom collapses."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the images (default: 3000 steps).")] = None,
    batch_size: Annotated[int | None, typer.Option(min=2, help="Images of a step (default: 32).")] = None,
    latent: Annotated[int | None, typer.Option(min=1, help="The length of a latent (default: 64).")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Channels of the last hidden layer (default: 32).")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    data_root: options.DataRoot = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files that are there.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train a small generator on public images, so that ggl and gias can search among such images.

    It sees the TEST part of the data set and nothing else: clients, and so all victims, hold the training part.

    A test image that clients hold too is left out. The file notes the data settings and a digest of the images.

    Give it the audit's config, or the same data settings, so that the parts are cut alike.

    For more public images, in sets that their makers did not cut: --set data.test_share=0.5, here and in the audit.

    Example: leaktight generator train --data digits --out digits.safetensors
    """
    from leaktight.api.generator import plan
    from leaktight.cli.generator_display import run
    from leaktight.config.settings import load_config
    from leaktight.config.toml import build
    from leaktight.models.gan_training import GanTraining

    said = {"kind": kind, "epochs": epochs, "batch_size": batch_size, "latent": latent, "width": width}
    given = {name: value for name, value in said.items() if value is not None}
    training = build(GanTraining, given, "generator train", "options")
    named = [*([f"data.kind={data}"] if data else []), *([f"data.size={size}"] if size else [])]
    resolved = load_config(config, [*named, *(overrides or [])])
    if data_root is not None:
        resolved = replace(resolved, data_root=data_root)
    run(plan(resolved, training, out, seed=seed, force=force), as_json=as_json)
