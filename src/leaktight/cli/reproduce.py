"""`leaktight reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from leaktight.cli import options
from leaktight.core.errors import UsageError

HELP = """Run a table or figure of a publication, and lay the result beside the published numbers.

Without NAME: all recipes with source, claims and expected time. The same command goes on after an interruption.

Example: leaktight reproduce outpost-table-3 --scale smoke
"""


def command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Recipes; see the list.")] = None,
    scale: Annotated[
        Literal["smoke", "cpu", "paper"],
        typer.Option(help="smoke: seconds, decides nothing; cpu: up to an hour on two cores; paper: as published."),
    ] = "smoke",
    everything: Annotated[bool, typer.Option("--all", help="All recipes that have this scale.")] = False,
    out: Annotated[Path, typer.Option("--out", help="The folder of all reproductions.")] = Path("runs/reproduce"),
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Only the runs of the I-th of N machines that share --out.")
    ] = "1/1",
    workers: options.Workers = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate what is left by a short rehearsal of each run, and stop.")
    ] = False,
    data_root: options.DataRoot = None,
    write_docs: Annotated[
        Path | None, typer.Option("--write-docs", metavar="FOLDER", help="Write the pages of all results there.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    from rich.console import Console

    from leaktight.cli.console import print_json, say
    from leaktight.cli.reproduce_display import print_plan, print_recipes, print_result, run_recipe
    from leaktight.reproductions.docs import collect, write_pages
    from leaktight.reproductions.recipe import read_recipe, reproducible
    from leaktight.reproductions.run import Reproduced, parse_shard

    if write_docs is not None and scale == "smoke":
        raise UsageError("expected --scale cpu or paper with --write-docs, got smoke, which decides nothing")
    console, place = Console(), parse_shard(shard)
    chosen = [each for each in map(read_recipe, names or reproducible()) if names or scale in each.scales]
    if dry_run:
        print_plan([Reproduced(recipe, scale, out, data_root) for recipe in chosen], workers, console)
    elif names or everything:
        results = []
        for recipe in chosen:
            result = run_recipe(Reproduced(recipe, scale, out, data_root), workers=workers, shard=place)
            results += [] if result is None else [result]
            if result is not None and not as_json:
                print_result(result, out, console)
        if as_json:
            print_json([each.document() for each in results])
    elif as_json:
        print_json([each.model_dump(mode="json", exclude={"path", "published"}) for each in chosen])
    elif write_docs is None:
        print_recipes([read_recipe(name) for name in reproducible()], console)
    if write_docs is not None:
        collect(out, write_docs, scale)
        say(console, "written: " + ", ".join(str(path) for path in write_pages(write_docs)))
