"""Tables in LaTeX (booktabs, tabularx) that fit one column of a two-column page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from leaktight.core.text import shown
from leaktight.report.comparison import compare
from leaktight.report.run_tables import TextTable
from leaktight.report.runs import Run

COLUMN = 240.0
"""Points that every table fits into; the columns of ACM and IEEE have 241 and 252."""
GAP = 6.0
"""Points between columns."""

_SIGNS = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "–": "--",
    "−": "$-$",
    "×": r"$\times$",
    "∞": r"$\infty$",
    "“": "``",
    "”": "''",
}
_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_NEW_LINE = r"\\"
_LONG = 80.0
"""Points of a figure that is put into several lines."""
_PARTS = re.compile(r" (?=\()| (?=to )")
_FIGURES = "0123456789–−"
_RAGGED = r"{\raggedright\arraybackslash}"
_BREAK = re.compile(r"(?<=[_:(,=/-])(?=\w)|(?<=[a-z]\.)(?=[a-z])")
"""Where a long name may be broken, beside blanks."""


def to_latex(runs: Sequence[Run]) -> str:
    """A LaTeX `table` environment for each table; one that is too wide becomes several with the same first columns."""
    comparison = compare(runs)
    comments = [f"Leakage: {', '.join(comparison.names)}", *comparison.warnings, *comparison.notes]
    parts = [r"% needs \usepackage{array,booktabs,tabularx}", *(f"% {_one_line(line)}" for line in comments)]
    parts += [_environment(piece) for table in comparison.tables for piece in _pieces(table)]
    return "\n".join(parts) + "\n"


def latex(text: str) -> str:
    r"""Text with LaTeX's special characters escaped.

    >>> latex("50 % of a_b {x} \\ ^")
    '50 \\% of a\\_b \\{x\\} \\textbackslash{} \\textasciicircum{}'
    >>> latex("1.6 × 10⁻⁵")
    '1.6 $\\times$ 10$^{-5}$'
    """
    plain = "".join(_SIGNS.get(letter, letter) for letter in _one_line(text))
    return re.sub("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda found: f"$^{{{found[0].translate(_RAISED)}}}$", plain)


def _one_line(text: str) -> str:
    return shown(" ".join(text.split()))


def _width(text: str) -> float:
    """Points that the text takes in 8 point Computer Modern, rather too many than too few."""
    sizes = ((6.6, lambda each: each.isupper() or each in "mw%"), (3.3, "iljtf.,:;()[]' ".__contains__))
    widths = (next((size for size, holds in sizes if holds(each)), 4.3 if each in _FIGURES else 4.6) for each in text)
    return sum(widths)


def _least(cells: Sequence[str]) -> float:
    """The width of a column of words: that of its longest part that cannot be broken."""
    return max(_width(part) for cell in cells for word in cell.split() or [""] for part in _BREAK.split(word))


def _columns(table: TextTable) -> list[tuple[str, ...]]:
    return list(zip(table.header, *table.rows, strict=True))


def _heads(table: TextTable) -> int:
    """1 if the first column repeats itself, and so becomes a line above the rows of each value; else 0."""
    firsts = [row[0] for row in table.rows]
    return int(table.text_columns > 1 and len(set(firsts)) < len(firsts))


def _blocks(columns: Sequence[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """Columns that say something only together: one whose heading is a small word ("worst") is of the one before."""
    blocks: list[list[tuple[str, ...]]] = []
    for column in columns:
        if blocks and column[0][:1].islower():
            blocks[-1].append(column)
        else:
            blocks.append([column])
    return blocks


def _pieces(table: TextTable) -> Iterator[TextTable]:
    """The table in pieces that fit, each with all columns of words and as many of figures as there is room for."""
    columns = _columns(table)
    words, figures = columns[: table.text_columns], columns[table.text_columns :]
    room = COLUMN - sum(_least(column) + GAP for column in words[_heads(table) :])
    groups: list[list[tuple[str, ...]]] = [[]]
    left = room
    for block in _blocks(figures):
        needed = sum(GAP + max(_width(line) for lines in _stacked(column) for line in lines) for column in block)
        if needed > left and groups[-1]:
            groups.append([])
            left = room
        groups[-1] += block
        left -= needed
    for number, group in enumerate(groups, start=1):
        header, *rows = zip(*words, *group, strict=True)
        title = table.title if len(groups) == 1 else f"{table.title} ({number} of {len(groups)})"
        note = table.note if number == len(groups) else ""
        yield replace(table, title=title, header=header, rows=tuple(rows), note=note)


def _environment(table: TextTable) -> str:
    heads, last = _heads(table), -1 if table.prose else None
    columns = _columns(table)[heads:last]
    words = table.text_columns - heads - int(table.prose)
    longest = max(range(words), key=lambda place: sum(map(len, columns[place])))
    kinds = ["X" if place == longest else f"p{{{_least(columns[place]):.0f}pt}}" for place in range(words)]
    form = "".join(f">{_RAGGED}{kind}" for kind in kinds) + "r" * (len(columns) - words)
    caption = f"{latex(table.title)}. {latex(table.note)}".strip()
    body = [line for row in _grouped(table.rows, heads) for line in _lines(row, heads, words, prose=table.prose)]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering\footnotesize",
            r"\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabularx}}{{\linewidth}}{{{form}}}",
            r"\toprule",
            " & ".join(
                [
                    *map(_breakable, table.header[heads:][:words]),
                    *(_stack(heading.split()) for heading in table.header[heads:last][words:]),
                ]
            )
            + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabularx}",
            r"\end{table}",
        ]
    )


def _grouped(rows: Sequence[tuple[str, ...]], heads: int) -> list[tuple[str, ...]]:
    """The rows, those with the same first cell together; that cell is empty in all but the first of them."""
    if not heads:
        return list(rows)
    firsts = dict.fromkeys(row[0] for row in rows)
    same = ([row for row in rows if row[0] == first] for first in firsts)
    return [(row[0] if place == 0 else "", *row[1:]) for group in same for place, row in enumerate(group)]


def _lines(row: tuple[str, ...], heads: int, words: int, *, prose: bool) -> Iterator[str]:
    """A row in LaTeX: a line above it for a first cell that heads others, and one below it for a sentence."""
    cells = row[heads : -1 if prose else None]
    if heads and row[0]:
        yield _across(row[0], len(cells))
    yield " & ".join([*map(_breakable, cells[:words]), *map(_figure, cells[words:])]) + r" \\"
    if prose:
        yield _across(row[-1], len(cells))


def _across(text: str, columns: int) -> str:
    return rf"\multicolumn{{{columns}}}{{>{_RAGGED}p{{0.97\linewidth}}}}{{{_breakable(text)}}} \\"


def _breakable(text: str) -> str:
    return r"\allowbreak ".join(map(latex, _BREAK.split(_one_line(text))))


def _stacked(column: tuple[str, ...]) -> list[list[str]]:
    """The lines of every cell of a column of figures, its heading first."""
    return [column[0].split(), *map(_split, column[1:])]


def _split(figure: str) -> list[str]:
    """A figure in one line; in several, if it is a long one with its interval."""
    return _PARTS.split(figure) if _width(figure) > _LONG else [figure]


def _figure(text: str) -> str:
    return _stack(_split(text))


def _stack(lines: Sequence[str]) -> str:
    found = [latex(line) for line in lines]
    return found[0] if len(found) == 1 else rf"\shortstack[r]{{{_NEW_LINE.join(found)}}}"
