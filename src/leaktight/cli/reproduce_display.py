"""The output of `leaktight reproduce`: the list of recipes, and a result beside the published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from leaktight.api.runs import parse_workers
from leaktight.audits.advice import duration
from leaktight.cli.audit_display import AuditDisplay
from leaktight.cli.console import say
from leaktight.cli.display import shown
from leaktight.reproductions.page import grid
from leaktight.reproductions.recipe import Recipe
from leaktight.reproductions.reproduce import reproduce
from leaktight.reproductions.result import Reproduction
from leaktight.reproductions.rules import Decision
from leaktight.reproductions.run import Job, Reproduced

_STYLES: Mapping[Decision, str] = {
    "holds": "green",
    "holds in part": "yellow",
    "does not hold": "bold red",
    "not testable here": "magenta",
}


def print_recipes(recipes: Sequence[Recipe], console: Console) -> None:
    """Each recipe with its source, the expected time of its scales, and its claims."""
    for recipe in recipes:
        times = ", ".join(f"{name} {duration(60 * scale.minutes)}" for name, scale in recipe.scales.items())
        console.print(Text(recipe.name, style="bold"), Text(f"{recipe.source}: {recipe.title} ({times})"))
        for claim in recipe.claims:
            console.print(Padding(Text(f"- {claim.says}"), (0, 0, 0, 2)))


def print_plan(plans: Sequence[Reproduced], workers: str | None, console: Console) -> None:
    """A line for each run that is left, with the expected minutes; one that recipes share is there once."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("recipe", "part", "run", "minutes"):
        table.add_column(column, overflow="fold", justify="right" if column == "minutes" else "left")
    known, total = set[Path](), 0.0
    for made in plans:
        for job in made.jobs:
            if job.done or job.path in known:
                continue
            known.add(job.path)
            minutes = job.expected(workers)
            total += minutes or 0.0
            table.add_row(
                made.recipe.name,
                _name(job),
                job.path.name,
                "not rehearsed" if minutes is None else f"{minutes:.1f}",
            )
    console.print(table)
    say(console, f"{len(known)} runs are left; about {total:.0f} minutes without those that are not rehearsed")


def _name(job: Job) -> str:
    return job.part.name if job.seed is None else f"{job.part.name}, seed {job.seed}"


def run_recipe(made: Reproduced, *, workers: str | None, shard: tuple[int, int]) -> Reproduction | None:
    """Run a recipe with a display of its progress."""
    parse_workers(workers)
    errors = Console(stderr=True)
    scale = made.recipe.scale(made.scale)
    say(errors, f"{made.recipe.name}, {made.scale}: {made.recipe.source}; about {scale.minutes:g} minutes on two cores")
    display = AuditDisplay(errors)

    def begins(number: int, job: Job) -> None:
        state = ": done before" if job.done else " (one function, without a bar)" if job.is_function else ""
        say(display.progress.console, f"run {number} of {len(made.jobs)}, {_name(job)}{state}")

    with display.progress:
        result = reproduce(made, workers=workers, watcher=display, shard=shard, begins=begins)
    if result is None:
        left = sum(not job.done for job in made.jobs)
        say(errors, f"{left} of {len(made.jobs)} runs are left to other shards")
    return result


def print_result(result: Reproduction, root: Path, console: Console) -> None:
    """The table, published beside measured, then the claims."""
    across, lines = grid(result)
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"{result.where}: {result.title}")
    for name in ("published / measured", *across):
        table.add_column(name, overflow="fold")
    for name, entries in lines.items():
        cells = (f"{entry.published or '-'} / {shown(entry.mean, '{:.4g}')}" for entry in entries)
        table.add_row(name, *cells)
    console.print(table)
    for claim in result.claims:
        console.print(f"{claim.verdict}: ", style=_STYLES[claim.decision], end="", highlight=False)
        say(console, f"{claim.says} ({claim.because})")
    say(console, f"page: {root / f'{result.recipe}-{result.scale}' / 'page.md'}")
