"""One made run for all tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.made_run import MadeRun


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a trade-off and figures over time. Tests write nothing into it but its report."""
    return MadeRun(tmp_path_factory.mktemp("runs") / "audit-001").add_all().finish(tradeoff=True, over_time=True)


@pytest.fixture(scope="session")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without the adaptive attack, the trade-off and the trials on one defense."""
    made = MadeRun(tmp_path_factory.mktemp("runs") / "audit-002")
    for trial, share in enumerate((0.3, 0.35, 0.4)):
        made.add("none", "csdlg", trial, share)
        made.add("outpost", "csdlg", trial, 0.9)
    return made.finish()


@pytest.fixture(scope="session")
def both_tracks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a production track, and all words of verdicts."""
    made = MadeRun(tmp_path_factory.mktemp("runs") / "audit-003").add_all().add_production()
    return made.finish(tradeoff=True, over_time=True)
