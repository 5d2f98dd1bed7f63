"""The files of a run for machines: `junit.xml` and `sarif.json`."""

from __future__ import annotations

from pathlib import Path

from leaktight.core.errors import UsageError
from leaktight.core.files import write_atomically
from leaktight.report.machines.junit import to_junit
from leaktight.report.machines.sarif import to_sarif
from leaktight.results.store import read_summary, read_text


def write_decision(folder: Path) -> None:
    """Write `junit.xml` and `sarif.json` into the folder of a finished run, from its result files."""
    summary = read_summary(folder)
    if summary is None:
        raise UsageError(f"the run in {folder} is not finished; continue it with --resume --out {folder}")
    write_atomically(folder / "junit.xml", to_junit(summary))
    write_atomically(folder / "sarif.json", to_sarif(summary, read_text(folder / "config.toml")))
