"""The output of an audit: progress on stderr, then the table and the verdicts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from string import ascii_lowercase
from typing import Protocol

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from leaktight.audits.plan import Experiment
from leaktight.audits.run import Watcher, check_something_ran
from leaktight.cli.console import called, print_json, resumable, say
from leaktight.cli.display import MISSING, progress_bars, shown
from leaktight.report.words import VERDICTS, defense_words, fact
from leaktight.results.schema import Cell, Ledger, Round, Score, Summary, Tradeoff, Trial, Word

STYLES: Mapping[Word, str] = {
    "leaks": "bold red",
    "partly": "yellow",
    "not-found": "green",
    "cannot-conclude": "magenta",
}
COLUMNS = ("attack", "PSNR dB", "SSIM", "worst", "blind", "leaked", "flags")
"""PSNR and SSIM with 95 % intervals, SSIM of the most leaking trial (worst) and of the best control (blind)."""
TRADEOFF_COLUMNS = ("defense", "worst SSIM", "by", "accuracy", "s / round", "its share", "front")


class AuditDisplay(Watcher):
    """Progress bars on a terminal, plain lines elsewhere. rounds: of training per defense."""

    def __init__(self, rounds: int, console: Console) -> None:
        self.training, self.console = rounds, console
        self.progress = progress_bars(console, transient=True, disable=not console.is_terminal)
        self.done = self.total = 0
        self.trials = self.progress.add_task("trials", total=None, visible=False)
        self.rounds: dict[str, TaskID] = {}

    def round_done(self, defense: str, row: Round) -> None:
        if defense not in self.rounds:
            self.rounds[defense] = self.progress.add_task(f"training, {defense}", total=self.training)
        self.progress.update(self.rounds[defense], completed=row.round)
        if not self.console.is_terminal:
            accuracy = "" if row.accuracy is None else f", accuracy {100 * row.accuracy:.1f} %"
            say(self.console, f"training, {defense}: round {row.round} of {self.training}{accuracy}")

    def trials_begin(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self.progress.update(self.trials, completed=done, total=total, visible=True)
        if done:
            say(self.console, f"{done} of {total} trials are done already")

    def trial_done(self, trial: Trial) -> None:
        self.done += 1
        self.progress.update(self.trials, completed=self.done)
        if not self.console.is_terminal:
            say(self.console, f"{self.done} of {self.total}: {trial_words(trial)}")


class Planned(Protocol):
    """An audit or an inspection that is ready to run."""

    def folder(self, out: Path | None, *, resume: bool) -> Path: ...

    def run(self, path: Path, *, resume: bool, workers: str | None, watcher: Watcher, call: str) -> Summary: ...


def run_and_print(
    planned: Planned,
    show: Callable[[Summary, Console], None],
    *,
    out: Path | None,
    resume: bool,
    workers: str | None,
    as_json: bool,
    rounds: int = 0,
) -> Summary:
    """Run in the folder `out` with a display of the progress, then print the summary by `show` or as JSON."""
    errors, path = Console(stderr=True), planned.folder(out, resume=resume)
    display = AuditDisplay(rounds, errors)
    with resumable(path, errors), display.progress:
        summary = planned.run(path, resume=resume, workers=workers, watcher=display, call=called())
    if as_json:
        print_json(summary.document())
    else:
        console = Console()
        show(summary, console)
        files = {"report": "report.html", "pictures": "images", "results": "summary.json"}
        say(console, "\n" + "   ".join(f"{name}: {path / file}" for name, file in files.items()))
    check_something_ran(summary)
    return summary


def announce(experiment: Experiment, facts: Mapping[str, object], console: Console) -> None:
    """Print the scenario and the planned attacks."""
    for name, value in facts.items():
        say(console, f"{name}: {value}")
    attacks = [f"{each.name} ({each.role})" for each in experiment.attacks if not each.adaptive]
    knowing = [f"; {each.name} with knowledge of {each.against}" for each in experiment.attacks if each.adaptive]
    defenses = ", ".join(each.name for each in experiment.defenses)
    say(console, f"{len(experiment.trials)} trials in total: {', '.join(attacks)} on {defenses}{''.join(knowing)}")


def trial_words(trial: Trial) -> str:
    """A finished trial on one line."""
    if trial.status == "failed":
        return f"{trial.id} failed: {trial.error}"
    scores = [f"{name} {score:.2f}" for name in ("psnr", "ssim") if (score := trial.score(name)) is not None]
    return f"{trial.id} {' '.join(scores)} ({trial.seconds:.1f} s)"


def print_audit(summary: Summary, console: Console) -> None:
    """Print the table of cells, the verdicts, the flags, and the trade-off if there is one."""
    letters = dict(zip(dict.fromkeys(flag.code for flag in summary.flags), ascii_lowercase, strict=False))
    console.print(cells_table(summary, letters))
    console.print(f"\na trial leaked {summary.leaked_if}", highlight=False, markup=False)
    console.print(f"assumed: {ledger_words(summary.ledger)}\n", highlight=False, markup=False)
    print_verdicts(summary, console)
    console.print()
    for code, letter in letters.items():
        flag = next(flag for flag in summary.flags if flag.code == code)
        console.print(f"({letter}) {code}: {flag.raised_if}; {flag.advice}", highlight=False, markup=False)
    if summary.tradeoff is not None:
        console.print()
        console.print(tradeoff_table(summary.tradeoff))
        if (advice := summary.tradeoff.recommendation) is not None:
            text = f"recommended: {advice.defense or 'none of these'}. {advice.because}"
            console.print(text, highlight=False, markup=False)


def print_verdicts(summary: Summary, console: Console) -> None:
    """Print the verdict on each defense, and the reason."""
    for each in summary.verdicts:
        words, style = VERDICTS[each.verdict].lower(), STYLES[each.verdict]
        knowing = ", attacker knows it" if "defense" in each.threat.knows else ""
        console.print(f"[bold]{defense_words(each.defense)}{knowing}[/]: [{style}]{words}[/]", highlight=False)
        console.print(f"  {each.because}", highlight=False, markup=False)


def ledger_words(ledger: Ledger) -> str:
    """The conditions of the scores on one line.

    >>> ledger_words(Ledger(labels="given", local_steps=1, batch_norm=False, assumed=()))
    'labels given, local steps 1, batch norm no'
    """
    known = {name.replace("_", " "): fact(value) for name, value in ledger.facts().items() if value != ()}
    return ", ".join(f"{name} {value}" for name, value in known.items())


def cells_table(summary: Summary, letters: Mapping[str, str]) -> Table:
    """A row for each attack on each defense; "+" marks an attacker who knows the defense. letters: of the flags."""
    table = _table(COLUMNS, left=("attack", "flags"))
    before = None
    for cell in summary.cells:
        if cell.role != "attack":
            continue
        if cell.defense != before:
            table.add_row(short_name(defense_words(cell.defense)), style="bold")
        table.add_row(*_cells(cell, letters))
        before = cell.defense
    return table


def short_name(method: str) -> str:
    """The name of a method in a table: without the module of a user's own class.

    >>> short_name("my_package.attacks:FirstLayer(rows=2)"), short_name("csdlg")
    ('FirstLayer(rows=2)', 'csdlg')
    """
    return re.sub(r"^[\w.]+:", "", method)


def tradeoff_table(tradeoff: Tradeoff) -> Table:
    table = _table(TRADEOFF_COLUMNS, left=("defense", "by"))
    for row in tradeoff.rows:
        table.add_row(
            short_name(defense_words(row.defense)),
            shown(row.leak.worst, "{:z.2f}"),
            short_name(row.leak.attack or MISSING),
            shown(row.accuracy, "{:.1%}"),
            shown(row.seconds_per_round, "{:z.2f}"),
            shown(row.cost_share, "{:.1%}"),
            "yes" if row.on_front else "",
        )
    return table


def _table(columns: tuple[str, ...], *, left: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def _cells(cell: Cell, letters: Mapping[str, str]) -> tuple[str, ...]:
    return (
        f"  {short_name(cell.attack)}{' +' if cell.adaptive else ''}",
        _spread(cell.scores.get("psnr"), "{:.0f}"),
        _spread(cell.scores.get("ssim"), "{:z.2f}"),
        shown(cell.worst_of("ssim"), "{:.2f}"),
        shown(cell.control.get("ssim"), "{:z.2f}"),
        "failed" if cell.leaked is None else f"{cell.leaked} of {cell.done}",
        " ".join(letters[code] for code in cell.flags),
    )


def _spread(score: Score | None, form: str) -> str:
    if score is None or score.ci95 is None:
        return MISSING
    low, high = (shown(end, form) for end in score.ci95)
    return f"{shown(score.mean, form)} [{low}, {high}]"
