"""`leaktight verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaktight.cli import options


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished audit or inspection.")],
    as_json: options.Json = False,
) -> None:
    """Check that a run's trials, pictures, settings and summary are as they were written.

    Exit code 0 if they are, 1 if something was changed. It notices accidents and careless edits; it is not a signature:
    whoever can write to the folder can also compute a new digest.

    Example: leaktight verify runs/audit-001
    """
    from leaktight.cli.console import print_json
    from leaktight.results.verify import verify

    found = verify(run)
    if as_json:
        document = {"trials": found.trials, "pictures": found.pictures, "digest": found.digest}
        changed = {"verified": not found.differences, "differences": list(found.differences)}
        print_json({"schema_version": 1, "run": str(run), **changed, **document})
    elif found.differences:
        typer.echo(f"{run} is not as it was written:", err=True)
        for each in found.differences:
            typer.echo(f"  {each}", err=True)
    else:
        typer.echo(f"verified: {found.trials} trials and {found.pictures} pictures, digest {found.digest}")
    if found.differences:
        raise typer.Exit(1)
