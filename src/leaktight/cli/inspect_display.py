"""The output of an inspection: the planned attacks, then the results."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from leaktight.api.inspect import PlannedInspection
from leaktight.api.runs import parse_workers
from leaktight.audits.run import check_something_ran
from leaktight.cli.audit_display import VERDICTS, AuditDisplay
from leaktight.cli.console import called, print_json, resumable, say
from leaktight.cli.display import shown
from leaktight.config.inspect import Prepared
from leaktight.results.schema import Summary


def announce(prepared: Prepared, console: Console) -> None:
    """Print the facts about the update, the planned attacks and the assumptions."""
    for name, fact in prepared.facts.items():
        say(console, f"{name}: {fact}")
    say(console, f"attacks: {', '.join(f'{entry.name} ({entry.role})' for entry in prepared.inspection.attacks)}")
    for note in prepared.inspection.assumed:
        say(console, f"assumed: {note}")


def run(
    planned: PlannedInspection,
    out: Path | None,
    *,
    resume: bool,
    workers: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Print the plan, run it, and print the results."""
    errors = Console(stderr=True)
    parse_workers(workers)
    announce(planned.prepared, errors)
    if dry_run:
        return
    path = planned.folder(out, resume=resume)
    with resumable(path, errors), AuditDisplay(0, errors) as display:
        summary = planned.run(path, resume=resume, workers=workers, watcher=display, call=called())
    if as_json:
        print_json(summary.document())
    else:
        console = Console()
        print_inspection(summary, console)
        files = {"report": "report.html", "pictures": "images", "results": "summary.json"}
        say(console, "\n" + "   ".join(f"{name}: {path / file}" for name, file in files.items()))
    check_something_ran(summary)


def print_inspection(summary: Summary, console: Console) -> None:
    """Print a row for each attack, the verdict and the flags."""
    console.print(attacks_table(summary))
    console.print()
    for verdict in summary.verdicts:
        words, style = VERDICTS[verdict.verdict]
        console.print(f"[bold]{verdict.defense}[/]: [{style}]{words}[/]", highlight=False)
        console.print(f"  {verdict.because}", highlight=False, markup=False)
    for flag in summary.flags:
        where = f" ({flag.cell.attack})" if flag.cell else ""
        console.print(
            f"\n{flag.code}{where}: {flag.detail}\n  raised if {flag.raised_if}; {flag.advice}",
            highlight=False,
            markup=False,
        )


def attacks_table(summary: Summary) -> Table:
    """Losses and labels of each attack; with the truth also scores and the best control (blind)."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    scores = ("PSNR dB", "SSIM", "blind SSIM") if summary.truth_given else ()
    for column in ("attack", "first loss", "last loss", *scores, "labels"):
        table.add_column(column, justify="left" if column in ("attack", "labels") else "right")
    for cell in summary.cells:
        if cell.role != "attack":
            continue
        figures = [shown(loss, "{:.3g}") for loss in (cell.first_loss, cell.loss)]
        if summary.truth_given:
            ssim = (cell.mean_of("ssim"), cell.control.get("ssim"))
            figures += [shown(cell.mean_of("psnr"), "{:.1f}"), *(shown(each, "{:.3f}") for each in ssim)]
        labels = "failed" if cell.failed else ",".join(map(str, cell.labels or ()))
        table.add_row(cell.attack, *figures, labels)
    return table
