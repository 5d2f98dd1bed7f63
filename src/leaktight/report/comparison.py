"""A comparison of runs: their figures side by side, the differences, and the facts in which they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from leaktight.report.cards import one_a_defense
from leaktight.report.judgements import chance_words, leaked_share, tracks_of, valid_trials, verdict_words
from leaktight.report.page import attackers_of, metrics_of
from leaktight.report.run_tables import (
    TextTable,
    attack_name,
    mean_words,
    metric_header,
    run_tables,
    titled,
)
from leaktight.report.runs import Run
from leaktight.report.words import (
    MISSING,
    defense_name,
    fact,
    fact_name,
    number,
    percent,
    seconds,
    signed,
    threat_words,
    tradeoff_names,
)
from leaktight.results.schema import Cell, Summary, Track, TradeoffRow, leaks_when, training_name


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Distinct names of the runs, their tables, notes for the reader, and warnings about unfinished runs."""

    names: tuple[str, ...]
    tables: tuple[TextTable, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def compare(runs: Sequence[Run]) -> Comparison:
    """The tables of one run, or of several runs side by side."""
    names = run_names(runs)
    return Comparison(
        names=names,
        tables=tuple(run_tables(runs[0].summary) if len(runs) == 1 else _side_by_side_tables(runs, names)),
        notes=(*_attackers(runs), "“Nothing found” is about the attacks that were tried; it is not a proof."),
        warnings=tuple(
            f"{name} is not finished: means of its trials so far, no verdict."
            for name, run in zip(names, runs, strict=True)
            if not run.finished
        ),
    )


def run_names(runs: Sequence[Run]) -> tuple[str, ...]:
    """Folder names, or paths for folders of the same name."""
    short = [run.name for run in runs]
    return tuple(name if short.count(name) == 1 else str(run.path) for name, run in zip(short, runs, strict=True))


def cell_keys(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Keys that match the cells of two runs: track, defense, attack, role, adaptive, and a number for repeated ones.

    The threat model is not part of the key, so that runs with different knowledge of the attacker can be compared.
    """
    found: list[tuple[str, ...]] = []
    for cell in cells:
        key = (cell.track, cell.defense, cell.attack, cell.role, str(cell.adaptive).lower())
        found.append((*key, str(sum(other[:-1] == key for other in found))))
    return found


def _attackers(runs: Sequence[Run]) -> list[str]:
    if len(runs) > 1:
        return []  # the table of differences shows them
    attackers = attackers_of(runs[0].summary)
    return [
        f"Attacker{f' {letter}' if len(attackers) > 1 else ''}: {threat_words(threat)}"
        for threat, letter in attackers.items()
    ]


def _side_by_side_tables(runs: Sequence[Run], names: Sequence[str]) -> list[TextTable]:
    summaries = [run.summary for run in runs]
    tracks = [track for track in get_args(Track) if any(track in tracks_of(summary) for summary in summaries)]
    tables = [_differences(runs, names)]
    for track in tracks:
        parts = [_of_track(summary, track) for summary in summaries]
        metrics = dict.fromkeys(name for part in parts for name in metrics_of(part.cells))
        found = [_verdicts(parts, names), *(_scores(parts, names, metric) for metric in metrics)]
        found += [_valid(parts, names), _shares(parts, names)]
        tables += [replace(table, title=titled(table.title, track, tracks)) for table in found]
    tables += _costs(summaries, names)
    return [table for table in tables if table.rows]


def _of_track(summary: Summary, track: Track) -> Summary:
    """The summary with the cells and verdicts of one track, one verdict for each defense."""
    verdicts = tuple(entry for entry in one_a_defense(summary) if entry.track == track)
    cells = tuple(cell for cell in summary.cells if cell.track == track)
    return summary.model_copy(update={"cells": cells, "verdicts": verdicts})


def _differences(runs: Sequence[Run], names: Sequence[str]) -> TextTable:
    """The facts that differ between the runs."""
    facts = [_facts(run) for run in runs]
    rows = []
    for key in dict.fromkeys(key for held in facts for key in held):
        values = [held.get(key, MISSING) for held in facts]
        if len(set(values)) > 1:
            rows.append((key, *values))
    return TextTable(
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


def _verdicts(summaries: Sequence[Summary], names: Sequence[str]) -> TextTable:
    found: dict[tuple[str, Track], list[str]] = {}
    for position, summary in enumerate(summaries):
        for entry in summary.verdicts:
            held = found.setdefault((entry.defense, entry.track), [MISSING] * len(summaries))
            held[position] = verdict_words(entry.verdict, summary.schema_version)
    rows = tuple((_defense(summaries, *place), *held) for place, held in found.items())
    return TextTable(title="Verdicts", header=("Defense", *names), rows=rows, text_columns=len(names) + 1)


def _defense(summaries: Sequence[Summary], defense: str, track: Track) -> str:
    """A defense with its settings; where these differ between the runs, those of each."""
    known = [summary for summary in summaries if training_name(track, defense) in summary.defenses] or summaries[:1]
    return " / ".join(dict.fromkeys(defense_name(summary, defense, track) for summary in known))


Pick = Callable[[Cell], tuple[str, float | None]]
"""A figure of a cell: as text, and as the number used for differences."""


def _side_by_side(
    summaries: Sequence[Summary], names: Sequence[str], pick: Pick, change: Callable[[float], str]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Header and rows: one row for each attack on each defense of any run."""
    cells = [dict(zip(cell_keys(summary.cells), summary.cells, strict=True)) for summary in summaries]
    rows = []
    for key in dict.fromkeys(key for held in cells for key in held):
        figures = [pick(held[key]) if key in held else (MISSING, None) for held in cells]
        if all(value is None for _, value in figures):
            continue
        shown = next(held[key] for held in cells if key in held)
        row = [_defense(summaries, shown.defense, shown.track), attack_name(shown), figures[0][0]]
        first = figures[0][1]
        for text, value in figures[1:]:
            row += [text, MISSING if value is None or first is None else change(value - first)]
        rows.append(tuple(row))
    header = ["Defense", "Attack", names[0]]
    for name in names[1:]:
        header += [name, "difference"]
    return tuple(header), tuple(rows)


def _scores(summaries: Sequence[Summary], names: Sequence[str], metric: str) -> TextTable:
    def pick(cell: Cell) -> tuple[str, float | None]:
        score = cell.scores.get(metric)
        if score is None:
            return MISSING, None
        return f"{mean_words(score, metric)}; {number(score.worst, metric, unit=False)}", score.mean

    header, rows = _side_by_side(summaries, names, pick, lambda difference: signed(difference, metric))
    notes = {name: note for summary in summaries for name, note in summary.metrics.items()}
    more = "Higher" if leaks_when(metric, notes) == "high" else "Lower"
    return TextTable(
        title=metric_header(metric),
        header=header,
        rows=rows,
        text_columns=2,
        note=f"Mean over valid trials, 95 % interval in brackets; then the most leaking trial. {more} leaks more. "
        f"Differences of means are from {names[0]}; small ones, compared with the intervals, may be chance.",
    )


def _valid(summaries: Sequence[Summary], names: Sequence[str]) -> TextTable:
    def pick(cell: Cell) -> tuple[str, float | None]:
        return f"{valid_trials(cell)} of {cell.trials}", valid_trials(cell)

    header, rows = _side_by_side(summaries, names, pick, lambda difference: f"{difference:+.0f}".replace("-", "−"))
    return TextTable(title="Valid trials", header=header, rows=rows, text_columns=2)


def _shares(summaries: Sequence[Summary], names: Sequence[str]) -> TextTable:
    def pick(cell: Cell) -> tuple[str, float | None]:
        tested = cell.identification
        picked = f"; picked out by chance {chance_words(tested.corrected)}" if tested else ""
        return f"{leaked_share(cell)}{picked}", cell.success_rate

    def change(difference: float) -> str:
        return f"{100 * difference:+.0f} points".replace("-", "−")

    header, rows = _side_by_side(summaries, names, pick, change)
    return TextTable(
        title="Reconstructed victims",
        header=header,
        rows=rows,
        text_columns=2,
        note="Of victims with valid trials; by chance: how often a guess without the update would do as well.",
    )


def _costs(summaries: Sequence[Summary], names: Sequence[str]) -> list[TextTable]:
    found: dict[str, dict[int, TradeoffRow]] = {}
    for position, summary in enumerate(summaries):
        rows = summary.tradeoff.rows if summary.tradeoff else ()
        for row, name in zip(rows, tradeoff_names(rows), strict=True):
            found.setdefault(name, {})[position] = row

    def table(title: str, text: Callable[[TradeoffRow], str]) -> TextTable:
        rows = tuple(
            (name, *(text(by_run[at]) if at in by_run else MISSING for at in range(len(names))))
            for name, by_run in found.items()
        )
        return TextTable(title=title, header=("Defense", *names), rows=rows, text_columns=1)

    return [
        table("Accuracy", lambda row: percent(row.accuracy)),
        table("Time a round", lambda row: seconds(row.seconds_per_round)),
    ]
