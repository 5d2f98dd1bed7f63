"""README.md: its Python example is a script of eight lines that runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import example

from leaktight.results.schema import Summary
from leaktight.results.store import read_summary


def test_own_model_own_images_one_verdict_in_eight_lines(tmp_path: Path) -> None:
    script = example("README.md", "lt.audit(")
    assert len([line for line in script.splitlines() if line]) == 8
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = read_summary(tmp_path / "runs" / "audit-001")
    assert isinstance(summary, Summary)
    said = [f"{each.defense}: {each.verdict}. {each.because}" for each in summary.verdicts]
    assert done.stdout.splitlines() == said
    assert said[0].startswith("none: reconstructed. csdlg reconstructed 1 of 1 victim")
    assert {each.defense for each in summary.verdicts} == {"none", "outpost"}
