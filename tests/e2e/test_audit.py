"""`leaktight audit` as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.audits.scenes import SMALL
from tests.seeds import replayed

RESULTS = {
    "command.txt",
    "config.toml",
    "digests.json",
    "environment.json",
    "images",
    "junit.xml",
    "report.html",
    "sarif.json",
    "secret.key",
    "summary.json",
    "trials.jsonl",
}


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "LEAKTIGHT_DATA": str(folder / "data"), "COLUMNS": "200"}


def leaktight(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leaktight", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False, timeout=600
    )


def started(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "leaktight", *arguments],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def trials(run: Path) -> dict[str, dict[str, Any]]:
    """All lines by id, without the time they took and the checksum over it."""
    lines = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines), "no trial twice"
    return {
        line["id"]: {key: value for key, value in line.items() if not key.endswith(("seconds", "sha256"))}
        for line in lines
    }


def wait_for_lines(run: Path, number: int, process: subprocess.Popen[str]) -> None:
    file, deadline = run / "trials.jsonl", time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if file.exists() and file.read_bytes().count(b"\n") >= number:
            return
        time.sleep(0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit")
    (path / "small.toml").write_text(f'secret_seed = "{"ab" * 32}"\n{SMALL}')
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    """The summary of an uninterrupted run, as it was printed."""
    done = leaktight("audit", "small.toml", "--json", "--workers", "2", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "10 of 10:" in done.stderr, "progress in plain lines"
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_one_json_document_and_a_complete_folder(folder: Path, whole: dict[str, Any]) -> None:
    run = folder / whole["run"]
    assert run == folder / "runs" / "audit-001"
    assert {path.name for path in run.iterdir()} - {".lock"} == RESULTS
    assert (run / "command.txt").read_text() == "leaktight audit small.toml --json --workers 2\n"
    assert json.loads((run / "summary.json").read_text()) == whole
    assert len(trials(run)) == 10


def test_ctrl_c_leaves_a_hint_that_works_and_nobody_else_may_write_meanwhile(
    folder: Path, whole: dict[str, Any]
) -> None:
    with started("audit", "small.toml", "--out", "run", "--workers", "1", folder=folder) as process:
        wait_for_lines(folder / "run", 1, process)
        os.killpg(process.pid, signal.SIGSTOP)  # so that it cannot end before the others have had their turn
        other = leaktight("audit", "small.toml", "--out", "run", "--resume", folder=folder)
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert other.returncode == 2
    assert other.stderr.splitlines()[-1].startswith("leaktight: another process is writing to run")
    assert process.returncode == 130
    assert "Traceback" not in errors
    before = trials(folder / "run")
    assert 0 < len(before) < 10
    assert not (folder / "run" / "summary.json").exists(), "no result of half the trials"
    hint = next(line for line in errors.splitlines() if line.startswith("stopped; continue with: "))
    words = hint.removeprefix("stopped; continue with: leaktight ").split()
    assert words[-1] == "--resume"
    resumed = leaktight(*words, folder=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{len(before)} of 10 trials are done already" in resumed.stderr
    assert trials(folder / "run") == trials(folder / whole["run"]), "one worker and two give the same"
    assert f"{whole['cells'][0]['ssim']['mean']:.2f} [" in resumed.stdout
    assert whole["verdicts"][0]["because"] in " ".join(resumed.stdout.split())
    assert "run/report.html" in resumed.stdout


def test_killed_and_resumed_it_gives_the_trials_of_an_uninterrupted_run(folder: Path, whole: dict[str, Any]) -> None:
    end = killed_and_resumed(folder, 1, ["audit", "small.toml", "--json", "--out", "cut"], 10)
    assert trials(folder / "cut") == trials(folder / whole["run"])
    assert end["verdicts"] == whole["verdicts"]


@pytest.mark.slow
def test_ten_kills_of_an_audit_of_30_trials(folder: Path) -> None:
    command = ["audit", "small.toml", "--json", "--trials", "6", "--set", "audit.attack_round=1"]
    done = leaktight(*command, "--out", "long", folder=folder)
    assert done.returncode == 0, done.stderr
    end = killed_and_resumed(folder, 10, [*command, "--out", "cut-often"], 30)
    assert len(trials(folder / "cut-often")) == 30
    assert trials(folder / "cut-often") == trials(folder / "long")
    assert end["verdicts"] == json.loads(done.stdout)["verdicts"]


def killed_and_resumed(folder: Path, kills: int, command: list[str], total: int) -> dict[str, Any]:
    """The summary of a run that was killed so many times at random moments."""
    moments = replayed(11).public_numpy()
    run = folder / command[-1]
    for number in range(kills):
        process = started(*command, "--resume", folder=folder)
        wait_for_lines(run, (number + 1) * total // (kills + 2), process)
        time.sleep(moments.uniform(0, 0.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not (run / "summary.json").exists(), "killed in the middle"
    end = leaktight(*command, "--resume", folder=folder)
    assert end.returncode == 0, end.stderr
    summary: dict[str, Any] = json.loads(end.stdout)
    return summary
