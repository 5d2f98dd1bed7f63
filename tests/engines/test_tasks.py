from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.processes import in_worker
from leaktight.engines.cluster import run_on_ray
from leaktight.engines.tasks import Job, run_locally


def square(job: Job) -> Job:
    if job["number"] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"number": job["number"], "square": job["number"] ** 2, "apart": in_worker(), "raw": b"\x00"}


def wait(job: Job) -> Job:
    if job["file"] is not None:
        Path(job["file"]).write_text(str(os.getpid()))
        time.sleep(60)
    return {}


@pytest.mark.parametrize("workers", [1, 2])
def test_every_job_is_done_once_in_a_process_of_its_own(workers: int) -> None:
    found = list(run_locally(square, [{"number": number} for number in range(5)], workers=workers))
    assert sorted(result["square"] for result in found) == [0, 1, 4, 9, 16]
    assert all(result["apart"] for result in found)
    assert list(run_locally(square, [], workers=workers)) == []


def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(LeaktightError, match="worker process died"):
        list(run_locally(square, [{"number": -1}], workers=1))


def test_closing_ends_the_work_at_once(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    results = run_locally(wait, [{"file": str(file)}, {"file": None}], workers=2)
    assert next(results) == {}, "the quick one"
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_ray_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"leaktight\[ray\]"):
        list(run_on_ray(square, [{"number": 1}]))
