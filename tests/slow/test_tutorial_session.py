"""docs/tutorial.md: a person with the wheel in an empty folder gets what the page shows, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.session import session

from leaktight.results.schema import Summary
from leaktight.results.store import read_summary


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_session_prints_what_the_page_shows(tmp_path: Path) -> None:
    # One test, so that the page is run once, however tests are spread over processes.
    printed = list(session(tmp_path))
    other = [each for each in printed if not each.as_written]
    told = "\n".join(f"the page has:\n{each.block.text}\nprinted was:\n{each.text}" for each in other)
    assert not other, f"{told}\nif it is meant to be so: python -m tests.docs.session"
    runs = sorted((tmp_path / "session" / "runs").iterdir())
    assert [run.name for run in runs] == ["audit-001", "audit-002", "audit-003", "inspect-001", "inspect-002"]
    for run in runs:
        summary = read_summary(run)
        assert isinstance(summary, Summary)
        assert all(cell.failed == 0 for cell in summary.cells)
        assert (run / "report.html").is_file()
