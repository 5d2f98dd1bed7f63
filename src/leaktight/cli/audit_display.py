"""The output of an audit: progress on stderr, then the answer, the verdicts and the tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from string import ascii_lowercase
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from leaktight.audits.plan import Experiment
from leaktight.audits.run import Watcher, check_something_ran
from leaktight.audits.schedule import Wanted, fewest
from leaktight.cli.console import called, print_json, resumable, say
from leaktight.cli.display import progress_bars
from leaktight.report.judgements import (
    TRACKS,
    accuracy_note,
    answer_lines,
    chance_words,
    chosen_words,
    fault_words,
    recommended_words,
    spending_facts,
    tracks_of,
    victims_words,
)
from leaktight.report.words import (
    MISSING,
    SYMBOLS,
    VERDICTS,
    attack_words,
    defense_name,
    defense_words,
    fact,
    fact_name,
    listed,
    number,
    percent,
    seconds,
)
from leaktight.results.schema import (
    VARIES,
    Cell,
    Ledger,
    Round,
    Score,
    Summary,
    Track,
    Tradeoff,
    Trial,
    Verdict,
    Word,
)

STYLES: Mapping[Word, str] = {
    "reconstructed": "bold red",
    "identified": "yellow",
    "labels-read": "yellow",
    "cannot-conclude": "magenta",
    "nothing-found": "green",
}
COLUMNS = ("attack", "PSNR dB", "SSIM", "blind", "rebuilt", "chance", "flags")
"""PSNR and SSIM with 95 % intervals, SSIM of the best control (blind), victims that were reconstructed of those with
valid trials, and the corrected chance of the identification."""
_HEADING = 24
"""Characters of a defense's name in a table before it wraps."""
TRADEOFF_COLUMNS = ("defense", "worst SSIM", "by", "accuracy", "round", "its share", "front")


class AuditDisplay(Watcher):
    """Progress bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = progress_bars(console, transient=True, disable=not console.is_terminal)
        self.done = self.total = 0
        self.trials = self.progress.add_task("trials", total=None, visible=False)
        self.rounds: dict[str, tuple[TaskID, int]] = {}

    def grows(self, words: Sequence[str]) -> None:
        say(self.console, f"the run grows: {'; '.join(words)}")

    def training_begins(self, name: str, rounds: int) -> None:
        self.rounds[name] = self.progress.add_task(f"training, {name}", total=rounds), rounds

    def round_done(self, name: str, row: Round) -> None:
        task, rounds = self.rounds[name]
        self.progress.update(task, completed=row.round)
        if not self.console.is_terminal:
            accuracy = "" if row.accuracy is None else f", accuracy {percent(row.accuracy)}"
            say(self.console, f"training, {name}: round {row.round} of {rounds}{accuracy}")

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

    def looked(self, needed: Wanted, done: int) -> None:
        self.done, self.total = done, len(needed.ids)
        self.progress.update(self.trials, completed=done, total=self.total)
        say(self.console, look_words(needed))


class Planned(Protocol):
    """An audit or an inspection that is ready to run."""

    def folder(self, out: Path | None, *, resume: bool) -> Path: ...

    def run(
        self, path: Path, *, resume: bool, workers: str | None, retry_failed: bool, watcher: Watcher, call: str
    ) -> Summary: ...


def run_and_print(
    planned: Planned,
    show: Callable[[Summary, Console], None],
    *,
    out: Path | None,
    resume: bool,
    retry_failed: bool,
    workers: str | None,
    as_json: bool,
) -> Summary:
    """Run in the folder `out` with a display of the progress, then print the summary by `show` or as JSON."""
    errors, path = Console(stderr=True), planned.folder(out, resume=resume)
    display = AuditDisplay(errors)
    with resumable(path, errors), display.progress:
        summary = planned.run(
            path, resume=resume, workers=workers, retry_failed=retry_failed, watcher=display, call=called()
        )
    if as_json:
        print_json(summary.document())
    else:
        console = Console()
        show(summary, console)
        files = {"report": "report.html", "pictures": "images", "results": "summary.json"}
        say(console, "\n" + "   ".join(f"{name}: {path / file}" for name, file in files.items()))
    check_something_ran(summary)
    return summary


def announce(experiments: Sequence[Experiment], facts: Mapping[str, object], console: Console) -> None:
    """Print the scenario and the planned attacks."""
    for name, value in facts.items():
        say(console, f"{name}: {value}")
    experiment = experiments[0]
    plain = [each for each in experiment.attacks if not each.adaptive and not each.undefended]
    attacks = [f"{each.name} ({each.role})" for each in plain]
    names = {each.name: defense_words(each.name, each.settings) for each in experiment.defenses}
    knowing = [f"; {name} with knowledge of {listed(known)}" for name, known in _known(experiment, names).items()]
    control = [f"; {each.name} on no defense" for each in experiment.attacks if each.undefended]
    least, most = fewest(experiments), sum(len(each.trials) for each in experiments)
    number = f"{most} trials in total" if least == most else f"{least} to {most} trials"
    say(console, f"{number}: {', '.join(attacks)} on {', '.join(names.values())}{''.join((*knowing, *control))}")


def _known(experiment: Experiment, names: Mapping[str, str]) -> dict[str, list[str]]:
    """By attack, the defenses that it also attacks with knowledge of them. names: the defenses with their settings."""
    found: dict[str, list[str]] = {}
    for each in experiment.attacks:
        if each.against is not None:
            found.setdefault(each.name, []).append(names[each.against])
    return {name: ["the defense"] if len(known) == len(names) - 1 else known for name, known in found.items()}


def look_words(needed: Wanted) -> str:
    """What the first look decided, on one line."""
    first, second = (listed(needed.names[each] for each in places) for places in (needed.decided, needed.further))
    return f"{needed.looks[0]} victims decided {first or 'nothing'}; {needed.looks[-1]} for {second or 'nothing'}"


def trial_words(trial: Trial) -> str:
    """A finished trial on one line."""
    if trial.status == "failed":
        return f"{trial.id} failed: {trial.error}"
    names = [name for name in ("psnr", "ssim") if trial.score(name) is not None]
    scores = [f"{name} {number(trial.score(name), name, unit=False)}" for name in names]
    return f"{trial.id} {' '.join(scores)} ({seconds(trial.seconds)})"


def print_audit(summary: Summary, console: Console) -> None:
    """Print the answer, the verdicts, a table of cells for each track, the flags, and the trade-off if there is one.

    The answer of a trade-off begins with its recommendation.
    """
    letters = dict(zip(dict.fromkeys(flag.code for flag in summary.flags), ascii_lowercase, strict=False))
    print_answer(summary, console)
    print_verdicts(summary, console)
    for track in tracks_of(summary):
        if len(tracks_of(summary)) > 1:
            console.print(f"[bold]{track.capitalize()}[/]", highlight=False)
        console.print(cells_table(summary, letters, track))
        _print_faults(summary, track, console)
        _print_ensembles(summary, track, console)
        console.print()
    _say(console, f"a victim counts as rebuilt {summary.leaked_if}")
    _say(console, f"assumed: {ledger_words(summary.ledger)}")
    for name, value in spending_facts(summary.spending, None).items():
        _say(console, f"{name.lower()}: {value}")
    for code, letter in letters.items():
        flag = next(flag for flag in summary.flags if flag.code == code)
        _say(console, f"({letter}) {code}: {flag.raised_if}; {flag.advice}")
    if summary.tradeoff is not None:
        console.print()
        console.print(tradeoff_table(summary.tradeoff))
        if summary.tradeoff.chance is not None:
            _say(console, accuracy_note(summary.tradeoff))
        advice = summary.tradeoff.recommendation
        if advice is not None and (summary.answer is None or summary.answer.recommended is None):
            _say(console, f"recommended: {recommended_words(summary.tradeoff)} {advice.because}")


def print_answer(summary: Summary, console: Console) -> None:
    """Print the five sentences of the answer, if there is one."""
    if summary.answer is None:
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for question, sentence in answer_lines(summary.answer):
        grid.add_row(question, Text(sentence.replace("`", "")))
    console.print(grid)
    console.print()


def print_verdicts(summary: Summary, console: Console) -> None:
    """Print the verdict on each defense in each track: the word, the strongest attack and its victims, the reason."""
    tracks = tracks_of(summary)
    for track in tracks:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column()
        for each in summary.verdicts:
            if each.track == track:
                proven = " (certified)" if each.certified else ""
                words = f"{SYMBOLS[each.verdict]} {VERDICTS[each.verdict].lower()}{proven}"
                word = Text(words, style=STYLES[each.verdict])
                grid.add_row(word, _strongest(each, summary))
                grid.add_row("", Text(f"{each.because} {each.advice}".strip(), style="dim"))
        if len(tracks) > 1:
            _say(console, f"{track.capitalize()}. {TRACKS[track]}")
        console.print(grid)
        console.print()


def _strongest(entry: Verdict, summary: Summary) -> Text:
    """The defense, and what the strongest attack did to it."""
    text = Text(defense_name(summary, entry.defense, entry.track), style="bold")
    same = (entry.worst_attack, entry.threat)
    lead = next((each for each in entry.attackers if (each.attack, each.threat) == same), None)
    if lead is not None:
        text.append(
            f": {attack_words(short_name(lead.attack), lead.adaptive)}, {victims_words(lead)}", style="not bold"
        )
    return text


def _print_faults(summary: Summary, track: Track, console: Console) -> None:
    """Print which trials count for nothing, and why."""
    for cell in summary.cells:
        if cell.role == "attack" and cell.track == track:
            for fault in fault_words(cell):
                _say(console, f"{_place(cell, summary)}: {fault}")


def _print_ensembles(summary: Summary, track: Track, console: Console) -> None:
    """Print which attacks of an ensemble gave its answers, and what the truth would have chosen."""
    for cell in summary.cells:
        if cell.track == track and cell.chosen:
            best = number(cell.oracle.get("psnr"), "psnr")
            oracle = f"oracle-best (chosen by the truth, not by an attacker) {best}"
            _say(console, f"{_place(cell, summary)}: {chosen_words(cell)}; {oracle}")


def _place(cell: Cell, summary: Summary) -> str:
    defense = defense_name(summary, cell.defense, cell.track)
    return f"{attack_words(short_name(cell.attack), cell.adaptive)} on {short_name(defense)}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)


def ledger_words(ledger: Ledger) -> str:
    """The conditions of the scores in one sentence.

    >>> ledger_words(Ledger(labels="given", local_steps=1, batch_norm=False, assumed=()))
    'labels given, local steps 1, batch norm no'
    >>> ledger_words(Ledger(labels="varies", local_steps=1, assumed="varies"))
    'local steps 1; not the same for all attacks: labels, other assumptions'
    """
    facts = {name: value for name, value in ledger.facts().items() if value != ()}
    shared = ", ".join(f"{name.replace('_', ' ')} {fact(value)}" for name, value in facts.items() if value != VARIES)
    differing = ", ".join(fact_name(name).lower() for name, value in facts.items() if value == VARIES)
    return "; ".join(filter(None, (shared, differing and f"not the same for all attacks: {differing}")))


def cells_table(summary: Summary, letters: Mapping[str, str], track: Track = "diagnostic") -> Group:
    """A line for each defense, and a row for each attack on it; "+" marks an attacker who knows the defense.

    letters: of the flags.
    """
    cells = [cell for cell in summary.cells if cell.role == "attack" and cell.track == track]
    rows: dict[str, list[tuple[str, ...]]] = {}
    for cell in cells:
        rows.setdefault(cell.defense, []).append(_cells(cell, letters))
    columns = zip(COLUMNS, *(row for own in rows.values() for row in own), strict=True)
    widths = [max(map(len, column)) for column in columns]
    parts: list[RenderableType] = [_table(COLUMNS, left=("attack", "flags"), widths=widths)]
    for defense, own in rows.items():
        table = _table(COLUMNS, left=("attack", "flags"), widths=widths, show_header=False)
        for row in own:
            table.add_row(*row)
        parts += [Text(short_name(defense_name(summary, defense, track)), style="bold"), table]
    return Group(*parts)


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
            short_name(defense_words(row.defense, row.settings)),
            number(row.leak.worst, row.leak.metric),
            short_name(row.leak.attack or MISSING),
            percent(row.accuracy) + (" near chance" if row.learned is False else ""),
            seconds(row.seconds_per_round),
            percent(row.cost_share),
            "yes" if row.on_front else "",
        )
    return table


def _table(
    columns: tuple[str, ...], *, left: tuple[str, ...], widths: Sequence[int] = (), show_header: bool = True
) -> Table:
    """An empty table. left: columns of words. widths: of the columns, so that tables below each other line up."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_header=show_header)
    for column, width in zip_longest(columns, widths):
        table.add_column(column, justify="left" if column in left else "right", min_width=width)
    return table


def _cells(cell: Cell, letters: Mapping[str, str]) -> tuple[str, ...]:
    return (
        _attack(cell),
        _spread(cell.scores.get("psnr"), "psnr"),
        _spread(cell.scores.get("ssim"), "ssim"),
        number(cell.control.get("ssim"), "ssim"),
        "none valid" if cell.leaked is None else f"{cell.leaked} of {cell.judged}",
        MISSING if cell.identification is None else chance_words(cell.identification.corrected),
        " ".join(letters[code] for code in cell.flags),
    )


def _attack(cell: Cell) -> str:
    return f"  {short_name(cell.attack)}{' +' if cell.adaptive else ''}"


def _spread(score: Score | None, metric: str) -> str:
    """A mean and its interval; the only space is where a narrow table breaks the line."""
    if score is None or score.ci95 is None:
        return MISSING
    low, high = (number(end, metric, unit=False) for end in score.ci95)
    return f"{number(score.mean, metric, unit=False)} [{low},{high}]"
