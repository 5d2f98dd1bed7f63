"""Results of recipes as Markdown: one section a recipe, one page a publication, one table of all claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from leaktight.report.words import counted
from leaktight.reproductions.recipe import PAPERS, Paper
from leaktight.reproductions.result import Entry, Reproduction
from leaktight.reproductions.rules import Decision

_MADE = "<!-- Made by `leaktight reproduce --write-docs`; do not edit. -->"
_MISSING = "-"


def section(result: Reproduction, figure: str | None = None) -> str:
    """The section of a result. figure: the path of its picture."""
    lines = [
        f"## {result.where}: {result.title}",
        "",
        f"`leaktight reproduce {result.recipe} --scale {result.scale}`, "
        f"{sum(run.minutes for run in result.runs):.0f} minutes.",
        "",
        *table(result),
        "",
        *([f"![{result.title}]({figure})", ""] if figure else []),
        *(["Differences from the published setting:", ""] if result.differences else []),
        *(f"- {each}" for each in result.differences),
        *([""] if result.differences else []),
        "| claim | rule, written before the run | decision | measured |",
        "|---|---|---|---|",
        *(f"| {each.says} | {each.rule} | **{each.verdict}** | {each.because} |" for each in result.claims),
        "",
        *([result.notes, ""] if result.notes else []),
    ]
    return "\n".join(lines)


def table(result: Reproduction) -> list[str]:
    """Published against measured: the mean and its 95 % interval."""
    across, lines = grid(result)
    most = max((entry.number for entry in result.entries), default=0)
    return [
        f"| published / measured, {counted(most, result.kind.removesuffix('s'))} | {' | '.join(across)} |",
        "|---" * (len(across) + 1) + "|",
        *(f"| {name} | {' | '.join(map(_cell, entries))} |" for name, entries in lines.items()),
    ]


def grid(result: Reproduction) -> tuple[list[str], dict[str, list[Entry]]]:
    """The table with its shorter side across: the names across, and the entries of each line by its name."""
    rows = list(dict.fromkeys(entry.row for entry in result.entries))
    columns = list(dict.fromkeys(entry.column for entry in result.entries))
    entries = {(entry.row, entry.column): entry for entry in result.entries}
    titles = {name: f"{name} (legacy)" if name in result.legacy else name for name in columns}
    if len(columns) > len(rows):
        return rows, {titles[column]: [entries[row, column] for row in rows] for column in columns}
    return list(titles.values()), {row: [entries[row, column] for column in columns] for row in rows}


def _cell(entry: Entry) -> str:
    if entry.mean is None or entry.low is None or entry.high is None:
        measured = _MISSING
    else:
        low, high = (f"{each + 0.0:.3g}" for each in (entry.low, entry.high))  # no -0
        measured = f"{entry.mean:.4g}" + (f" [{low}, {high}]" if entry.number > 1 else "")
    return f"{entry.published or _MISSING} / {measured}"


def paper_page(paper: Paper, results: Sequence[Reproduction], figures: Mapping[str, str]) -> str:
    """All results of a publication."""
    body = "\n".join(section(each, figures.get(each.recipe)) for each in results)
    return f"{_MADE}\n# {PAPERS[paper]}: published and measured\n\n{_tally(results)}\n\n{body}"


def claims_table(results: Sequence[Reproduction]) -> str:
    """All claims of all publications, with the decisions."""
    lines = [
        _tally(results),
        "",
        "| publication | place | claim | decision |",
        "|---|---|---|---|",
        *(
            f"| [{PAPERS[each.paper]}]({each.paper}.md) | {each.where} | {claim.says} | **{claim.verdict}** |"
            for each in results
            for claim in each.claims
        ),
    ]
    return "\n".join(lines)


def _tally(results: Sequence[Reproduction]) -> str:
    found = Counter(claim.decision for each in results for claim in each.claims)
    words = ", ".join(f"{word}: {found[word]}" for word in get_args(Decision))
    undecided = sum(claim.undecided for each in results for claim in each.claims)
    return f"{counted(sum(found.values()), 'claim')}. {words} ({undecided} of them undecided)."
