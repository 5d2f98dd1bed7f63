"""Work in processes of their own: one thread each. They leave Ctrl-C to the main process, and never outlive it.

A script that starts them needs the usual `if __name__ == "__main__":`, as every process imports the script again.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from types import TracebackType
from typing import Any, TypeAlias

import torch

from leaktight.core.errors import LeaktightError

Tell: TypeAlias = Callable[[Any], None]
"""How work speaks to the main process while it runs."""

Work: TypeAlias = Callable[[Any, Tell], Any]
"""What is done with a job. It is pickled by name, so it stands at the top of a module."""

_POLL_SECONDS = 0.1
_worker: dict[str, Any] = {}  # filled once, when a worker process starts; never in the main process


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_worker() -> bool:
    """Whether this is a worker process, which should start no others: the cores are taken."""
    return bool(_worker)


def become_worker() -> None:
    """Make this process a worker of somebody else's pool, such as Ray's: one thread, and it starts no others."""
    torch.set_num_threads(1)
    _worker["life"] = None


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread, as worker processes do: the same bits whatever the number of processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Pool:
    """Processes for as long as a block runs. An error or Ctrl-C in the block ends them at once, whatever they do."""

    def __init__(self, number: int, *, start: Callable[..., None], args: tuple[Any, ...] = (), preload: str) -> None:
        """start: called once in every process with `args`. preload: a module that all of them need."""
        context = _context(preload)
        self._watched, self._life = context.Pipe(duplex=False)
        self.executor = ProcessPoolExecutor(
            number, mp_context=context, initializer=_begin, initargs=(self._watched, start, args)
        )

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._life.close()
        self.executor.shutdown(wait=True, cancel_futures=True)
        self._life.close()
        self._watched.close()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self.executor.submit(function, *args)


def run_all(
    work: Work,
    jobs: Iterable[Any],
    *,
    workers: int,
    told: Callable[[int, Any], None] = lambda place, message: None,
    done: Callable[[int, Any], None] = lambda place, result: None,
) -> list[Any]:
    """The results of `work` on every job, in the order of the jobs. Jobs are taken as workers become free.

    told: called here with a job's place and what its work tells. done: the same with its result, once it is there.
    One worker is this process, and so it is for a single job. An error of the work is raised here, and ends everything.
    """
    waiting = iter(jobs)
    first = list(islice(waiting, 2))
    if workers > 1 and len(first) > 1:
        return _run_in_pool(work, chain(first, waiting), workers, told, done)
    results = []
    for place, job in enumerate(chain(first, waiting)):
        results.append(work(job, partial(told, place)))
        done(place, results[-1])
    return results


def _run_in_pool(
    work: Work,
    jobs: Iterable[Any],
    workers: int,
    told: Callable[[int, Any], None],
    done: Callable[[int, Any], None],
) -> list[Any]:
    channel = _context(work.__module__).SimpleQueue()
    results: dict[int, Any] = {}
    waiting = enumerate(jobs)
    running: dict[Future[bytes], int] = {}
    with Pool(workers, start=_start_work, args=(work, channel), preload=work.__module__) as pool, broken_pool_named():
        while True:
            while len(running) <= workers and (following := next(waiting, None)) is not None:
                place, job = following
                running[pool.submit(_run_work, place, pickle.dumps(job))] = place
            if not running:
                return [results[place] for place in sorted(results)]
            finished, _ = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            while not channel.empty():
                told(*pickle.loads(channel.get()))
            for future in finished:
                place = running.pop(future)
                results[place] = pickle.loads(future.result())
                done(place, results[place])


@contextmanager
def broken_pool_named() -> Iterator[None]:
    """Say in words that a process died."""
    try:
        yield
    except BrokenProcessPool as error:
        raise LeaktightError(
            "a worker process died (killed, or out of memory?); continue with --resume, or use fewer --workers; "
            'a script of your own needs `if __name__ == "__main__":` around its work'
        ) from error


def _context(preload: str) -> Any:
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([preload])
    return context


def _begin(life: Connection, start: Callable[..., None], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the main process handles it
    torch.set_num_threads(1)
    _worker["life"] = life
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    start(*args)


def _end_with(life: Connection) -> None:
    """A worker ends when the main process closes its end of the pipe, or dies, even killed."""
    parent = multiprocessing.parent_process()
    wait_for([life] if parent is None else [life, parent.sentinel])
    os._exit(1)


def _start_work(work: Work, channel: Any) -> None:
    _worker["work"], _worker["channel"] = work, channel


def _run_work(place: int, job: bytes) -> bytes:
    """Jobs, results and messages are pickled here, by value: as shared memory they would cost file handles."""

    def tell(message: Any) -> None:
        _worker["channel"].put(pickle.dumps((place, message)))

    try:
        return pickle.dumps(_worker["work"](pickle.loads(job), tell))
    except Exception as error:
        if _portable(error):
            raise
        raise LeaktightError(f"{type(error).__name__}: {error}") from None


def _portable(error: Exception) -> bool:
    """Whether an error survives the way to the main process; one that does not would break the pool."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
