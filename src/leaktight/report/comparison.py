"""Runs side by side: every figure beside that of the other runs, how far apart they are, and what else differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leaktight.report.page import attackers_of, metrics_of
from leaktight.report.pareto import row_names
from leaktight.report.run_tables import Table, attack_name, mean_words, metric_header, run_tables
from leaktight.report.runs import Run
from leaktight.report.words import (
    MISSING,
    VERDICTS,
    defense_words,
    fact,
    fact_name,
    number,
    percent,
    seconds,
    threat_words,
)
from leaktight.results.schema import Cell, Summary, leaks_when


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs under names that tell them apart, their tables, and what a reader must know. warnings: unfinished runs."""

    names: tuple[str, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def compare(runs: Sequence[Run]) -> Comparison:
    """The tables of one run, or of several beside each other."""
    names = run_names(runs)
    return Comparison(
        names=names,
        tables=tuple(run_tables(runs[0].summary) if len(runs) == 1 else _beside(runs, names)),
        notes=(*_attackers(runs), "“No leak found” is about the attacks that were tried; it is not a proof."),
        warnings=tuple(
            f"{name} is not finished: plain means of its trials so far, no verdict."
            for name, run in zip(names, runs, strict=True)
            if not run.finished
        ),
    )


def run_names(runs: Sequence[Run]) -> tuple[str, ...]:
    """Folder names, or whole paths where folders have the same name."""
    short = [run.name for run in runs]
    return tuple(name if short.count(name) == 1 else str(run.path) for name, run in zip(short, runs, strict=True))


def row_keys(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """What makes a cell the same in two runs: defense, attack, role. Where a run has several, also which of them.

    The attacker is not part of it, so that runs with attackers who know more or less can be compared.
    """
    found: list[tuple[str, ...]] = []
    for cell in cells:
        key = (cell.defense, cell.attack, cell.role, str(cell.adaptive).lower())
        found.append((*key, str(sum(other[:-1] == key for other in found))))
    return found


def _attackers(runs: Sequence[Run]) -> list[str]:
    if len(runs) > 1:
        return []  # where they differ, the table of differences says so
    attackers = attackers_of(runs[0].summary)
    return [
        f"Attacker{f' {letter}' if len(attackers) > 1 else ''}: {threat_words(threat)}"
        for threat, letter in attackers.items()
    ]


def _beside(runs: Sequence[Run], names: Sequence[str]) -> list[Table]:
    summaries = [run.summary for run in runs]
    metrics = dict.fromkeys(name for summary in summaries for name in metrics_of(summary.cells))
    tables = [
        _differences(runs, names),
        _verdicts(summaries, names),
        *(_scores(summaries, names, metric) for metric in metrics),
        _shares(summaries, names),
        *_costs(summaries, names),
    ]
    return [table for table in tables if table.rows]


def _differences(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """Facts that are not the same in all runs: without knowing them, a comparison misleads."""
    facts = [_facts(run) for run in runs]
    rows = []
    for key in dict.fromkeys(key for held in facts for key in held):
        values = [held.get(key, MISSING) for held in facts]
        if len(set(values)) > 1:
            rows.append((key, *values))
    return Table(
        title="What differs between the runs",
        header=("Fact", *names),
        rows=tuple(rows),
        text_columns=len(names) + 1,
        note="A difference in leakage may come from any of these.",
    )


def _facts(run: Run) -> dict[str, str]:
    held: dict[str, object] = {"Attackers": " ".join(threat_words(threat) for threat in attackers_of(run.summary))}
    held |= {f"Ledger: {fact_name(key)}": value for key, value in run.summary.ledger.facts().items()}
    held |= {f"Scenario: {fact_name(key)}": value for key, value in run.summary.scenario.items()}
    held |= {f"Version: {name}": version for name, version in run.environment.packages.items()}
    return {key: fact(value) for key, value in held.items()}


def _verdicts(summaries: Sequence[Summary], names: Sequence[str]) -> Table:
    found: dict[tuple[str, bool], list[list[str]]] = {}
    for position, summary in enumerate(summaries):
        for entry in summary.verdicts:
            key = entry.defense, "defense" in entry.threat.knows
            held = found.setdefault(key, [[] for _ in summaries])
            held[position].append(VERDICTS[entry.verdict])
    rows = tuple(
        (
            defense_words(defense) + (", attacker knows it" if known else ""),
            *("; ".join(each) or MISSING for each in held),
        )
        for (defense, known), held in found.items()
    )
    return Table(title="Verdicts", header=("Defense", *names), rows=rows, text_columns=len(names) + 1)


Pick = Callable[[Cell], tuple[str, float | None]]
"""A figure of a cell: as text, and as the number of which differences are taken."""


def _side_by_side(
    summaries: Sequence[Summary], names: Sequence[str], pick: Pick, change: Callable[[float], str]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Header and rows: one row for each attack on each defense that any run has."""
    cells = [dict(zip(row_keys(summary.cells), summary.cells, strict=True)) for summary in summaries]
    rows = []
    for key in dict.fromkeys(key for held in cells for key in held):
        figures = [pick(held[key]) if key in held else (MISSING, None) for held in cells]
        if all(value is None for _, value in figures):
            continue
        shown = next(held[key] for held in cells if key in held)
        row = [defense_words(shown.defense), attack_name(shown), figures[0][0]]
        first = figures[0][1]
        for text, value in figures[1:]:
            row += [text, MISSING if value is None or first is None else change(value - first)]
        rows.append(tuple(row))
    header = ["Defense", "Attack", names[0]]
    for name in names[1:]:
        header += [name, "difference"]
    return tuple(header), tuple(rows)


def _scores(summaries: Sequence[Summary], names: Sequence[str], metric: str) -> Table:
    def pick(cell: Cell) -> tuple[str, float | None]:
        score = cell.scores.get(metric)
        if score is None:
            return MISSING, None
        return f"{mean_words(score, metric)}; {number(score.worst, metric, unit=False)}", score.mean

    def change(difference: float) -> str:
        return ("+" if difference > 0 else "") + number(difference, metric, unit=False)

    header, rows = _side_by_side(summaries, names, pick, change)
    said = {name: note for summary in summaries for name, note in summary.metrics.items()}
    more = "Higher" if leaks_when(metric, said) == "high" else "Lower"
    return Table(
        title=metric_header(metric),
        header=header,
        rows=rows,
        text_columns=2,
        note=f"Mean over trials, 95 % interval in brackets; then the most leaking trial. {more} leaks more. "
        f"Differences are of means, from {names[0]}; the intervals say how much of them may be chance.",
    )


def _shares(summaries: Sequence[Summary], names: Sequence[str]) -> Table:
    def pick(cell: Cell) -> tuple[str, float | None]:
        return f"{percent(cell.success_rate, 0)} of {cell.done}", cell.success_rate

    def change(difference: float) -> str:
        return f"{100 * difference:+.0f} points".replace("-", "−")

    header, rows = _side_by_side(summaries, names, pick, change)
    return Table(title="Trials that leaked", header=header, rows=rows, text_columns=2)


def _costs(summaries: Sequence[Summary], names: Sequence[str]) -> list[Table]:
    accuracy: dict[str, dict[int, float | None]] = {}
    time: dict[str, dict[int, float | None]] = {}
    for position, summary in enumerate(summaries):
        rows = summary.tradeoff.rows if summary.tradeoff else ()
        for row, name in zip(rows, row_names(rows), strict=True):
            accuracy.setdefault(name, {})[position] = row.accuracy
            time.setdefault(name, {})[position] = row.seconds_per_round

    def table(title: str, held: dict[str, dict[int, float | None]], written: Callable[[float | None], str]) -> Table:
        rows = tuple((name, *(written(values.get(at)) for at in range(len(names)))) for name, values in held.items())
        return Table(title=title, header=("Defense", *names), rows=rows, text_columns=1)

    return [table("Accuracy", accuracy, percent), table("Time a round", time, seconds)]
