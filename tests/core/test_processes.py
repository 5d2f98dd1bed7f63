from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from leaktight.core import processes
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.processes import Tell, in_worker, one_thread, run_all


class TwoWordsError(Exception):
    """Cannot be rebuilt from its pickle: the constructor wants two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def double(job: Any, tell: Tell) -> Any:
    """Some jobs mean trouble."""
    if job == 13:
        raise UsageError("thirteen is not a number")
    if job == 14:
        raise TwoWordsError("hard", "luck")
    if job == 99:
        os._exit(1)
    tell(f"at {job}")
    return {"value": 2 * torch.tensor([job]), "threads": torch.get_num_threads(), "worker": in_worker()}


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_messages_with_their_place(workers: int) -> None:
    told: list[tuple[int, str]] = []
    done: list[int] = []
    jobs = (number for number in (5, 3, 8, 1))
    with one_thread():
        results = run_all(
            double,
            jobs,
            workers=workers,
            told=lambda place, message: told.append((place, message)),
            done=lambda place, result: done.append(place),
        )
    assert [int(result["value"]) for result in results] == [10, 6, 16, 2]
    assert {result["threads"] for result in results} == {1}
    assert {result["worker"] for result in results} == {workers > 1}
    assert sorted(told) == [(0, "at 5"), (1, "at 3"), (2, "at 8"), (3, "at 1")]
    assert sorted(done) == [0, 1, 2, 3]
    assert not in_worker()


def test_jobs_that_end_all_at_once_do_not_hide_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "wait", lambda running, **_: concurrent.futures.wait(running))
    assert [int(result["value"]) for result in run_all(double, range(1, 8), workers=2)] == [2, 4, 6, 8, 10, 12, 14]


def test_nothing_to_do_and_a_single_job_start_no_process() -> None:
    assert run_all(double, [], workers=4) == []
    assert [result["worker"] for result in run_all(double, [7], workers=4)] == [False]


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [(13, UsageError, "thirteen"), (14, LeaktightError, "TwoWordsError: hard luck"), (99, LeaktightError, "died")],
)
def test_an_error_in_a_process_is_raised_here(job: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_all(double, [1, job], workers=2)


SLEEPY = """
import os, time
from leaktight.core.processes import run_all

def sleep(job, tell):
    tell(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    run_all(sleep, [1, 2], workers=2, told=lambda place, message: print(message, flush=True))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_main_process(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "sleepy.py"
    script.write_text(SLEEPY)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as main:
        assert main.stdout is not None
        workers = [int(main.stdout.readline()) for _ in range(2)]
        assert all(alive(worker) for worker in workers)
        main.send_signal(how)
        main.wait(timeout=30)
    deadline = time.monotonic() + 30
    while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(worker) for worker in workers)


def alive(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    try:
        os.kill(process, 0)
        return "State:\tZ" not in status.read_text() if Path("/proc/self").exists() else True
    except (ProcessLookupError, FileNotFoundError):
        return False
