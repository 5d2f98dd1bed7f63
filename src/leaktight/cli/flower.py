"""`leaktight flower export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaktight.cli import options
from leaktight.config.tables import read_tables


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the Flower project.")],
    config: options.Config = None,
    overrides: options.Set = None,
    defense: options.Stacked = None,
) -> None:
    """Write the scenario as a Flower project, to run with `flwr run` as a simulation or on a SuperLink.

    Example: leaktight flower export my-app my.toml --defense outpost
    """
    read_tables(config, overrides or (), named={"defense": defense or ()})  # report errors before slow imports
    from rich.console import Console

    from leaktight.api.flower_project import export
    from leaktight.cli.console import say
    from leaktight.config.settings import load_config
    from leaktight.models.user import UserModel

    resolved = load_config(config, overrides or (), defenses=defense or ())
    clients = export(folder, resolved)
    errors = Console(stderr=True)
    say(errors, f"{folder}: a Flower project for {clients} clients; its README.md says how to run it")
    if isinstance(resolved.model.source, UserModel):
        say(errors, f"{resolved.model.source.target} must be importable at the server and at every node")
