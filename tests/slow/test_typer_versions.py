"""The help is the same with the lowest Typer that pyproject.toml allows, and with the newest that there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_help import COMMANDS
from tests.docs.pages import ROOT

DUMP = """
import sys

if blocked := sys.argv[2:]:  # Typer has a Click of its own since 0.26: no other may be needed
    sys.modules.update(dict.fromkeys(blocked))
from leaktight.cli.app import main

for line in sys.argv[1].split(","):
    sys.argv = ["leaktight", *line.split(), "--help"]
    try:
        main()
    except SystemExit as ended:
        assert ended.code in (0, None), ended.code
"""
[LOWEST] = re.findall(r'"typer>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())


def helps(*blocked: str, packages: Path | None = None) -> str:
    """The help of all commands, with these packages before those of the environment."""
    path = os.pathsep.join(map(str, filter(None, (packages, ROOT / "src"))))
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": path}
    program = [sys.executable, "-c", DUMP, ",".join(map(" ".join, COMMANDS)), *blocked]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [[f"typer=={LOWEST}.0", "click==8.1.8"], [f"typer=={LOWEST}.0"], ["typer"]], ids=str)
def test_the_help_is_the_same(tmp_path: Path, wanted: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), *wanted]
    if subprocess.run(pip, capture_output=True, timeout=300).returncode:
        pytest.skip(f"{wanted} cannot be installed here; a package index is needed")
    own_click = not (tmp_path / "click").exists()
    assert helps(*(["click"] if own_click else []), packages=tmp_path) == helps()
