"""`leaktight report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaktight.core.errors import UsageError, suggestion

COMPARISON = Path("comparison.html")
REDACTED = "report-redacted.html"
FORMATS = ("html", "md", "csv", "latex")


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are compared.")],
    form: Annotated[str, typer.Option("--format", help="html, or tables: md, csv, latex.")] = "html",
    out: Annotated[
        Path | None,
        typer.Option(help="The file (default: RUN/report.html, comparison.html for several; tables are printed)."),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option("--redact", help=f"Leave out pictures, client names, paths, errors: RUN/{REDACTED}."),
    ] = False,
) -> None:
    """Write the report of a run, compare several runs, or print their tables.

    Example: leaktight report runs/audit-001 runs/audit-002 --format md
    """
    if form not in FORMATS:
        raise UsageError(f"no format {form!r}; {suggestion(form, FORMATS)}")
    if redact and (form != "html" or len(runs) > 1):
        given = f"--format {form}" if form != "html" else f"{len(runs)} runs"
        raise UsageError(f"expected one run as html with --redact, got {given}; redact each run's page by itself")
    from leaktight.core.files import write_atomically
    from leaktight.report.html import render_comparison, render_redacted, render_report
    from leaktight.report.runs import load_run
    from leaktight.report.tables import WRITERS
    from leaktight.results.verify import doubt

    loaded = [load_run(folder) for folder in runs]
    for doubtful in filter(None, (doubt(run.path) for run in loaded)):
        typer.echo(f"warning: {doubtful}", err=True)
    if form != "html":
        text = WRITERS[form](loaded)
        if out is None:
            typer.echo(text.encode(), nl=False)  # bytes, so that a terminal without UTF-8 does not raise
            return
        path = out
    else:
        name = REDACTED if redact else "report.html"
        path = out or (loaded[0].path / name if len(loaded) == 1 else COMPARISON)
        render = render_redacted if redact else render_report
        text = render(loaded[0]) if len(loaded) == 1 else render_comparison(loaded, path.parent)
    write_atomically(path, text)
    for run in loaded:
        if not run.finished:
            typer.echo(f"{run.path} is not finished; the report shows its trials so far", err=True)
    typer.echo(f"report: {path}")
