"""The output of an inspection: the planned attacks, then the results."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from leaktight.audits.plan import AttackEntry
from leaktight.cli.audit_display import print_answer, print_verdicts
from leaktight.cli.console import say
from leaktight.config.inspect import Prepared
from leaktight.report.words import number
from leaktight.results.schema import Summary


def announce(prepared: Prepared, console: Console) -> None:
    """Print the facts about the update, the planned attacks and the assumptions."""
    for name, fact in prepared.facts.items():
        say(console, f"{name}: {fact}")
    attacks = (f"{entry.name} ({_role(entry)})" for entry in prepared.inspection.attacks)
    say(console, f"attacks: {', '.join(attacks)}")
    for note in prepared.inspection.assumed:
        say(console, f"assumed: {note}")


def _role(entry: AttackEntry) -> str:
    return "attack that knows the defense" if entry.adaptive else entry.role


def print_inspection(summary: Summary, console: Console) -> None:
    """Print the answer, the verdict, a row for each attack, and the flags."""
    print_answer(summary, console)
    print_verdicts(summary, console)
    console.print(attacks_table(summary))
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
        figures = [number(loss, "loss") for loss in (cell.first_loss, cell.loss)]
        if summary.truth_given:
            figures += [number(cell.mean_of("psnr"), "psnr", unit=False), number(cell.mean_of("ssim"), "ssim")]
            figures += [number(cell.control.get("ssim"), "ssim")]
        labels = "failed" if cell.failed else ",".join(map(str, cell.labels or ()))
        table.add_row(f"{cell.attack}{' (knowing)' if cell.adaptive else ''}", *figures, labels)
    return table
