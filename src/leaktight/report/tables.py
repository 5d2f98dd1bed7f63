"""Tables as Markdown and CSV; `latex` has those for papers."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence

from leaktight.core.text import shown
from leaktight.report.comparison import cell_keys, compare, run_names
from leaktight.report.latex import to_latex
from leaktight.report.runs import Run
from leaktight.report.words import fact
from leaktight.results.schema import Cell, Score, Threat

Key = tuple[str, ...]
_MINUSES = str.maketrans(dict.fromkeys("‐‑‒–—−﹣", "-"))
CSV_KEYS = ("table", "track", "defense", "attack", "role", "adaptive", "which", "round", "metric", "statistic")
"""Columns of the CSV. track: empty for tables that have one only. which: the number of the cell among those of the same
attack on the same defense, from 0."""

CSV_NOTES = ("defense_settings", "attacker")
"""Columns that say more of each figure; where runs differ, what holds for each."""


def to_markdown(runs: Sequence[Run]) -> str:
    """The tables in Markdown, each with a heading."""
    comparison = compare(runs)
    parts = [f"# Leakage: {markdown(', '.join(comparison.names))}", *map(markdown, comparison.warnings)]
    for table in comparison.tables:
        marks = ["---"] * table.text_columns + ["---:"] * (len(table.header) - table.text_columns)
        lines = [_markdown_row(table.header), "|" + "|".join(marks) + "|", *map(_markdown_row, table.rows)]
        parts += [f"## {markdown(table.title)}", "\n".join(lines)]
        if table.note:
            parts.append(markdown(table.note))
    parts.append("\n".join(f"- {markdown(note)}" for note in comparison.notes))
    return "\n\n".join(parts) + "\n"


def to_csv(runs: Sequence[Run]) -> str:
    """One line per figure: its key, its value in each run, and the differences from the first run."""
    names = run_names(runs)
    found: dict[Key, dict[int, float]] = {}
    notes: dict[Key, dict[tuple[str, str], None]] = {}
    for position, run in enumerate(runs):
        for key, attacker, value in _figures(run):
            if value is not None:
                found.setdefault(key, {})[position] = value
                notes.setdefault(key, {})[_settings(run, key), attacker] = None
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    columns = [csv_text(name) for name in names] if len(runs) > 1 else ["value"]
    writer.writerow([*CSV_KEYS, *CSV_NOTES, *columns, *(csv_text(f"{name} minus {names[0]}") for name in names[1:])])
    for key, held in found.items():
        values = [held.get(at) for at in range(len(runs))]
        changes = [None if value is None or values[0] is None else value - values[0] for value in values[1:]]
        told = [" | ".join(dict.fromkeys(each)) for each in zip(*notes[key], strict=True)]
        writer.writerow([*map(csv_text, (*key, *told)), *map(_csv_number, values + changes)])
    return buffer.getvalue()


def markdown(text: str) -> str:
    r"""Text with Markdown's special characters escaped.

    >>> markdown("a|b_c*<i>")
    'a\\|b\\_c\\*&lt;i&gt;'
    """
    escaped = re.sub(r"([\\`*_{}\[\]|#~!])", r"\\\1", _one_line(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def csv_text(text: str) -> str:
    """Text in one line that a spreadsheet does not run as a formula, also where it reads wide signs as narrow ones.

    >>> csv_text("=1+1"), csv_text("＝1"), csv_text("\\r-1"), csv_text("outpost")
    ("'=1+1", "'＝1", "'-1", 'outpost')
    """
    line = _one_line(text)
    start = unicodedata.normalize("NFKC", line[:1]).translate(_MINUSES)
    return f"'{line}" if start in tuple("=+-@|%") else line


def _one_line(text: str) -> str:
    return shown(" ".join(text.split()))


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(markdown(cell) for cell in cells) + " |"


def _figures(run: Run) -> Iterator[tuple[Key, str, float | None]]:
    """Every figure of a run: its key in the order of `CSV_KEYS`, the attacker, the value in full precision."""
    for key, cell in zip(cell_keys(run.summary.cells), run.summary.cells, strict=True):
        for (metric, statistic), value in _cell_figures(cell):
            yield ("leakage", *key, "", metric, statistic), _attacker(cell.threat), value
    tradeoff = run.summary.tradeoff
    for at, row in enumerate(tradeoff.rows if tradeoff else ()):
        earlier = sum(other.defense == row.defense for other in tradeoff.rows[:at]) if tradeoff else 0
        cost = ("tradeoff", "", row.defense, "", "", "", str(earlier) if earlier else "", "")
        yield (*cost, row.leak.metric, "worst"), "", row.leak.worst
        yield (*cost, "accuracy", "final"), "", row.accuracy
        yield (*cost, "seconds_per_round", "mean"), "", row.seconds_per_round
        yield (*cost, "cost_share", "mean"), "", row.cost_share
    for moment in run.summary.over_time or ():
        adaptive = str(moment.adaptive).lower()
        when = ("over_time", "", moment.defense, moment.attack, "attack", adaptive, "0", str(moment.round))
        for metric, score in moment.scores.items():
            for statistic, value in _statistics(score):
                yield (*when, metric, statistic), "", value
        yield (*when, "accuracy", "mean"), "", moment.accuracy


def _settings(run: Run, key: Key) -> str:
    """All settings of the defense of a figure."""
    _, track, defense, *_ = key
    settings = run.summary.defense_settings(defense, "production" if track == "production" else "diagnostic")
    return fact(settings) if settings else ""


def _cell_figures(cell: Cell) -> Iterator[tuple[tuple[str, str], float | None]]:
    for metric, score in cell.scores.items():
        for statistic, value in _statistics(score):
            yield (metric, statistic), value
        yield (metric, "without_update"), cell.control.get(metric)
    yield ("trials", "count"), cell.done
    yield ("failed", "count"), cell.failed
    yield ("valid", "count"), cell.valid
    yield ("victims", "count"), cell.victims
    yield ("reconstructed", "count"), cell.reconstructed
    yield ("success_rate", "mean"), cell.success_rate
    for name, test in (("identification", cell.identification), ("label_reading", cell.label_reading)):
        yield (name, "chance"), None if test is None else test.chance
        yield (name, "corrected"), None if test is None else test.corrected
    for metric, best in cell.oracle.items():
        yield (metric, "oracle"), best
    yield ("seconds", "mean"), cell.seconds


def _attacker(threat: Threat) -> str:
    return f"{threat.server}; sees {threat.sees}; knows {' '.join(threat.knows)}"


def _statistics(score: Score) -> list[tuple[str, float | None]]:
    low, high = score.ci95 or (None, None)
    return [("mean", score.mean), ("ci95_low", low), ("ci95_high", high), ("worst", score.worst)]


def _csv_number(value: float | None) -> str:
    return "" if value is None else repr(value)


WRITERS: Mapping[str, Callable[[Sequence[Run]], str]] = {"md": to_markdown, "csv": to_csv, "latex": to_latex}
"""The writers of tables, by format."""
