"""README.md: its Python examples are scripts of eight and six lines that run as they stand."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import example

from leaktight.results.schema import Summary
from leaktight.results.store import read_summary


def ran(script: str, folder: Path) -> str:
    (folder / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_image_out_of_one_gradient_in_six_lines(tmp_path: Path) -> None:
    script = example("README.md", "lt.reconstruct(")
    assert len([line for line in script.splitlines() if line]) == 6
    scores = ast.literal_eval(ran(script, tmp_path))
    assert scores["psnr"] > 60
    assert scores["ssim"] > 0.99
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_change_of_weights_in_memory(tmp_path: Path) -> None:
    printed = ran(example("docs/inspect.md", "lt.reconstruct("), tmp_path)
    assert printed.startswith("tensor([3, 5])")
    assert "psnr" in printed


def test_own_model_own_images_one_verdict_in_eight_lines(tmp_path: Path) -> None:
    script = example("README.md", "lt.audit(")
    assert len([line for line in script.splitlines() if line]) == 8
    printed = ran(script, tmp_path)
    summary = read_summary(tmp_path / "runs" / "audit-001")
    assert isinstance(summary, Summary)
    said = [f"{each.defense}: {each.verdict}. {each.because}" for each in summary.verdicts]
    assert printed.splitlines() == said
    assert said[0].startswith("none: reconstructed. csdlg reconstructed 1 of 1 victim")
    assert {each.defense for each in summary.verdicts} == {"none", "outpost"}
