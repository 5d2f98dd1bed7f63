"""`leaktight flower export` and `leaktight flower key`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaktight.cli import options
from leaktight.cli.help import Command, Group
from leaktight.config.tables import read_tables
from leaktight.core.errors import UsageError
from leaktight.core.files import slug

HELP = """Leaktight in a Flower federation.

Example: leaktight flower export my-app --defense outpost
"""
app = typer.Typer(cls=Group, no_args_is_help=True, help=HELP)


@app.command("export", cls=Command)
def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the Flower project.")],
    config: options.Config = None,
    overrides: options.Set = None,
    defense: options.Stacked = None,
) -> None:
    """Write the scenario as a Flower project, to run with `flwr run` as a simulation or on a SuperLink.

    Example: leaktight flower export my-app --defense outpost
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


@app.command("key", cls=Command)
def key(
    state_dir: Annotated[Path, typer.Argument(metavar="STATE_DIR", help="The node's private folder (`state-dir`).")],
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="The client that the node is, such as client-000.")],
) -> None:
    """Print the line of a node for the operator's list of keys; makes the node's key if it has none.

    Example: leaktight flower key state client-000 >> nodes.toml
    """
    from leaktight.api.flower import node_key

    if client != slug(client):
        raise UsageError(f"expected the name of a client, such as client-000, got {client!r}")
    typer.echo(f'{client} = "{node_key(state_dir, client)}"')
