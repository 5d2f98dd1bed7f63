"""A set of recipes that is killed again and again loses nothing and repeats nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leaktight.reproductions.recipe import read_recipe
from leaktight.reproductions.run import Reproduced
from leaktight.results.store import read_trials

NAMES = ["agic-table-3", "fedkl-table-5-2", "fedboosting-figure-4-3", "agic-figure-6"]
"""Two audits, trainings and a function."""


def finished(root: Path) -> dict[str, object]:
    """What is done so far: trials, and runs without trials."""
    made = [job for name in NAMES for job in Reproduced(read_recipe(name), "smoke", root).jobs]
    trials = {
        f"{job.path.name}/{name}": trial
        for job in made
        if job.part.command == "audit"
        for name, trial in read_trials(job.path).items()
    }
    return {**trials, **{job.path.name: job.minutes for job in made if job.done}}


@pytest.mark.slow
def test_killed_again_and_again_it_loses_and_repeats_nothing(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "leaktight", "reproduce", *NAMES, "--workers", "0", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LEAKTIGHT_DATA": str(tmp_path / "data")}
    draw, before, kills, code = random.Random(0), dict[str, object](), 0, None
    while code is None:
        process = subprocess.Popen(
            call, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            code = process.wait(draw.uniform(6, 14))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills, now = kills + 1, finished(tmp_path)
            assert {name: now.get(name) for name in before} == before, "what was done is as it was"
            before = now
    assert code == 0
    assert kills >= 2, "it was killed on the way"
    now = finished(tmp_path)
    assert {name: now.get(name) for name in before} == before
    for name in NAMES:
        assert (tmp_path / f"{name}-smoke" / "result.json").exists()
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("parts/*/time.json")}
    assert subprocess.run(call, env=environment, check=False, capture_output=True).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps, "nothing is run again"
