"""`leaktight report`: the page and the tables of runs, made from their result files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import typer

from leaktight.core.errors import UsageError, suggestion
from leaktight.core.files import write_atomically
from leaktight.report.html import render_comparison, render_report
from leaktight.report.runs import Run, load_run
from leaktight.report.tables import to_csv, to_latex, to_markdown

COMPARISON = Path("comparison.html")
_TABLES: Mapping[str, Callable[[Sequence[Run]], str]] = {"md": to_markdown, "csv": to_csv, "latex": to_latex}


def run_report(folders: Sequence[Path], *, form: str, out: Path | None) -> None:
    """Write a page and say where it lies, or print tables (write them, with `out`)."""
    if form != "html" and form not in _TABLES:
        raise UsageError(f"no format {form!r}; {suggestion(form, ['html', *_TABLES])}")
    runs = [load_run(folder) for folder in folders]
    if form != "html":
        text = _TABLES[form](runs)
        if out is None:
            typer.echo(text.encode(), nl=False)  # bytes: a terminal without UTF-8 is no reason to fail
            return
        path = out
    else:
        path = out or (runs[0].path / "report.html" if len(runs) == 1 else COMPARISON)
        text = render_report(runs[0]) if len(runs) == 1 else render_comparison(runs, path.parent)
    write_atomically(path, text)
    for run in runs:
        if not run.finished:
            typer.echo(f"{run.path} is not finished; the report shows its trials so far", err=True)
    typer.echo(f"report: {path}")
