"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.here import Here

DATA_ROOT = Path(os.environ.get("LEAKTIGHT_DATA") or Path(__file__).parents[2] / "shared" / "data")

torch.set_num_threads(1)

# A shell starts background jobs with Ctrl-C ignored, and children inherit that; some tests send it to theirs.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def real_data() -> Path:
    """The folder of real data sets; the test is skipped where there is none."""
    if not DATA_ROOT.is_dir():
        pytest.skip(f"no real data sets at {DATA_ROOT}; set LEAKTIGHT_DATA to a folder that holds them")
    return DATA_ROOT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """`leaktight` in a folder of the test's own: `here("audit", "--json")` gives exit code, output and errors."""
    return Here(tmp_path, monkeypatch, capsys)
