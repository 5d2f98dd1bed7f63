"""Hostile files: real commands on inputs that are made to break their readers."""

from __future__ import annotations

import csv
import io
import tempfile
import unicodedata
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.faults.count import Count
from bench.faults.hostile import CASES, Case
from bench.faults.hostile.results import honest_run
from bench.faults.hostile.run import BYTES, SECONDS, Outcome, run, warm
from bench.faults.hostile.tensors import TRAPS

WANTED = (
    f"refused in one line that names it, exit code 2, within {SECONDS:.0f} s and {BYTES / 1e9:g} GB, no traceback, no "
    "control characters"
)
CELLS = (
    "=1+1",
    "+1",
    "-1",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "a\rb",
    "a\nb",
    "＝1",
    "＋1",
    "－1",
    "＠a",
    "−1",
    "a\x1b[2J",
)


def counts() -> Iterator[Count]:
    """A count for each kind of file, with the longest time and the most memory beyond the program's."""
    warm()
    for group in dict.fromkeys(case.group for case in CASES):
        yield _count(group, WANTED, [case for case in CASES if case.group == group])
    yield _count("pickle with code", "refused, and the code does not run", TRAPS)
    yield _cells()


def _count(fault: str, wanted: str, cases: tuple[Case, ...] | list[Case]) -> Count:
    found: list[tuple[Case, Outcome]] = [(case, run(case)) for case in cases]
    wrong = [f"{case.name}: {faults[0]}" for case, outcome in found if (faults := outcome.faults(case))]
    seconds = max(outcome.seconds for _, outcome in found)
    peak = max(outcome.peak for _, outcome in found)
    note = "; ".join([f"at most {seconds:.1f} s and {peak / 1e6:.0f} MB", *wrong])
    return Count(fault, wanted, len(cases), len(cases) - len(wrong), note.replace("|", "/"))


def _cells() -> Count:
    """Names that a spreadsheet would run or break a line at, written by `leaktight report --format csv`."""
    kept = []
    for cell in CELLS:
        with tempfile.TemporaryDirectory() as place:
            folder = honest_run(Path(place) / "run", {"outpost": cell})
            outcome = run(Case("cell", repr(cell), partial(_report, folder)))
            kept.append(outcome.code == 0 and harmless(outcome.said))
    return Count(
        "CSV cell", "no cell starts a formula, breaks a line or holds control characters", len(CELLS), sum(kept)
    )


def _report(folder: Path, _place: Path) -> list[str]:
    return ["report", str(folder), "--format", "csv"]


def harmless(text: str) -> bool:
    """Whether no cell of a CSV would be run or break a line."""
    cells = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    bad = [
        cell for cell in cells if unicodedata.normalize("NFKC", cell[:1]) in ("=", "+", "@") or not cell.isprintable()
    ]
    minus = [cell for cell in cells if cell[:1] in "-－−" and cell and not _number(cell)]
    return bool(cells) and not bad and not minus


def _number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
