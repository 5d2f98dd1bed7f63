from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
import torch

from leaktight.core.errors import LeaktightError, MachineError, UsageError
from leaktight.core.types import Broadcast, Examples
from leaktight.runtime import processes
from leaktight.runtime.cluster import Ray
from leaktight.runtime.executor import Executor, Inline, Tell, in_order
from leaktight.runtime.processes import Processes, in_worker, one_thread, run_all
from leaktight.runtime.sharing import dumped, loaded


@pytest.fixture(autouse=True)
def main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of Flower's nodes, which answer in this process, have made a worker of it."""
    monkeypatch.setattr(processes, "_worker", {})


class TwoWordsError(Exception):
    """Cannot be rebuilt from its pickle: the constructor wants two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def double(job: Any, tell: Tell[str]) -> Any:
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
            on_message=lambda place, message: told.append((place, message)),
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


@dataclass(frozen=True)
class Sum:
    """Adds up the examples that it holds and the model of a job."""

    examples: Examples

    def __call__(self, job: tuple[int, Broadcast], tell: Tell[object]) -> torch.Tensor:
        number, model = job
        return model.params["w"] + number + int(self.examples.inputs.sum())


def test_the_end_of_the_process_that_starts_workers_is_a_fault_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection to it is reset while a job is handed in."""

    def reset(*args: object) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(concurrent.futures.ProcessPoolExecutor, "submit", reset)
    with pytest.raises(MachineError, match="a worker process died"):
        run_all(double, [1, 2], workers=2)


@pytest.mark.parametrize("executor", [Inline(), Processes(2)])
def test_workers_hold_examples_and_are_sent_a_common_model_in_every_run(executor: Executor) -> None:
    work = Sum(Examples(torch.ones(2, 1, 1, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)))
    with executor.start(work) as workers:
        for start in (0.5, 1.5):
            model = Broadcast({"w": torch.tensor([start])}, {}, 0)
            found = in_order(workers.run([(number, model) for number in range(5)], shared=[model]))
            assert [float(each) for each in found] == [start + 2 + number for number in range(5)]


def test_a_shared_value_is_left_out_of_a_job_and_a_view_takes_only_itself_along() -> None:
    model = Broadcast({"w": torch.zeros(10_000)}, {}, 3)
    job = dumped({"model": model, "row": model.params["w"][:2]}, [model])
    assert len(job) < 1000
    again = loaded(job, [model])
    assert again["model"] is model
    assert torch.equal(again["row"], torch.zeros(2))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
    ],
)
def test_tensors_arrive_as_they_were(tensor: torch.Tensor) -> None:
    again = loaded(dumped([tensor, tensor]))
    assert again[0] is again[1]
    assert torch.equal(again[0], tensor)
    assert (again[0].dtype, again[0].stride(), again[0].requires_grad) == (
        tensor.dtype,
        tensor.stride(),
        tensor.requires_grad,
    )


def test_even_a_single_job_has_a_process_of_its_own() -> None:
    with Processes(1).start(double) as workers:
        assert [result["worker"] for _, result in workers.run([7])] == [True]
        assert list(workers.run([])) == []


def wait(job: str | None, tell: Tell[int]) -> None:
    if job is not None:
        Path(job).write_text(str(os.getpid()))
        time.sleep(60)


def test_closing_the_results_ends_the_work_at_once(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with Processes(2).start(wait) as workers:
        results = workers.run([str(file), None])
        assert next(results) == (1, None), "the quick one"
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_ray_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"leaktight\[ray\]"), Ray().start(double) as workers:
        list(workers.run([1]))


SLEEPY = """
import os, time
from leaktight.runtime.processes import run_all

def sleep(job, tell):
    tell(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    run_all(sleep, [1, 2], workers=2, on_message=lambda place, message: print(message, flush=True))
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


def hang_up() -> None:
    """Ask the thread that sends shared tensors for one, as a worker does, and end before it comes."""
    kept, _ = os.pipe()
    handle: Any = reduction.DupFd(kept)
    address, key = handle._id
    with Client(address, authkey=multiprocessing.current_process().authkey):
        pass
    with Client(address, authkey=multiprocessing.current_process().authkey) as patient:  # served after the other
        patient.send((key, os.getpid()))
        os.close(reduction.recv_handle(patient))


def test_a_worker_that_is_ended_while_it_gets_a_tensor_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: told.append(kind))
    hang_up()
    assert told == [EOFError], "what Python does by itself"
    for _ in range(2):
        watched, life = multiprocessing.Pipe(duplex=False)
        processes._end(life)
        watched.close()
    hang_up()
    assert told == [EOFError]
    sys.excepthook(ValueError, ValueError(), None)
    assert told == [EOFError, ValueError], "other errors are told, once"
