"""Independent tasks in processes of their own: results come as they are finished, in any order.

A task is run by one process at a time, on one thread, so neither their number nor their order changes a result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import as_completed
from typing import Any, Protocol, TypeAlias

from leaktight.core.processes import Pool, available_cores, broken_pool_named
from leaktight.core.types import Examples
from leaktight.engines.workers import received, shareable
from leaktight.fl.wire import decode, encode

Job: TypeAlias = Mapping[str, Any]
Task: TypeAlias = Callable[[Job], Job]
"""What is done with a job; both are values that `fl.wire` can carry. The task itself is sent to every process once."""


class Runner(Protocol):
    """Runs a task on every job. Closing the generator ends everything at once."""

    def __call__(self, task: Task, jobs: Sequence[Job]) -> Generator[Job, None, None]: ...


def run_locally(
    task: Task, jobs: Sequence[Job], *, workers: int | None = None, preload: str = __name__
) -> Generator[Job, None, None]:
    """Results in order of completion. workers: processes on this machine (None: one per core).

    preload: a module with what the task needs; it is imported once, and not by every process.
    Even a single worker is a process of its own, so that it computes exactly as one of many does.
    """
    if not jobs:
        return
    number = min(workers or available_cores(), len(jobs))
    with Pool(number, start=_hold, args=shareable(task), preload=preload) as pool, broken_pool_named():
        for future in as_completed([pool.submit(_run, encode(job)) for job in jobs]):
            yield decode(future.result())


_worker: dict[str, Task] = {}  # filled once, when a worker process starts; never in the main process


def _hold(data: bytes, shared: list[Examples]) -> None:
    _worker["task"] = received(data, shared)


def _run(job: bytes) -> bytes:
    return encode(_worker["task"](decode(job)))
