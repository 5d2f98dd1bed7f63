"""The page on deployments is a script: its blocks are run in order, as one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.docs.pages import fenced
from tests.engines.flower.deployment import BIN, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def script() -> str:
    """All blocks of the page. Ports are free ones, and what installs is left out."""
    text = "".join(block.text for block in fenced("docs/flower-deployment.md") if block.language == "sh")
    lines = [line for line in text.splitlines() if not line.startswith("pip install")]
    whole = "\n".join(lines).replace("9000", str(free_port()))
    for place in range(3):
        whole = whole.replace("for i in 0 1 2; do", f"for i in 0 1 2; do\n    port{place}={free_port()}", 1)
    return "set -eu -o pipefail -m\n" + whole.replace("--port 910$i", '--port "$(eval echo \\$port$i)"') + "\n"


def test_the_page_run_as_one_script_loses_no_node_and_shows_nobody_anything(tmp_path: Path) -> None:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", script()],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "NO_COLOR": "1"},
        stdout=(tmp_path / "log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(1500)
    finally:
        left = ["ps", "-o", "pid=", "-s", str(process.pid)]
        for line in subprocess.run(left, capture_output=True, text=True, check=False).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)
    folder = tmp_path / "flower"
    assert code == 0, (tmp_path / "log").read_text()[-3000:]
    rounds = json.loads((folder / "run" / "summary.json").read_text())["rounds"]
    assert [(row["clients"], row["failures"]) for row in rounds] == [(3, {})] * 3
    assert not (folder / "run" / "flower" / "keys.json").exists(), "the operator's list was used"
    readable = [str(path) for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert not readable, "files that others can read"
    assert {"superlink.db-wal", "superlink.db"} & {path.name for path in folder.iterdir()}
