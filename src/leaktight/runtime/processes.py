"""Worker processes with one thread each. The main process handles Ctrl-C; workers end when it ends.

A script that starts them needs `if __name__ == "__main__":`, as every process imports the script again.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import resource_sharer
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.queues import SimpleQueue
from types import TracebackType
from typing import Any, Generic

import torch

from leaktight.core.errors import LeaktightError, MachineError
from leaktight.core.faults import raise_fault
from leaktight.runtime.allocator import keep_freed
from leaktight.runtime.executor import Executor, Inline, J, M, OnMessage, R, Work, Workers, ignored, in_order
from leaktight.runtime.sharing import Shared, dumped, in_shared_memory, loaded, without_examples

_POLL_SECONDS = 0.1
_worker: dict[str, Any] = {}  # empty unless this process is a worker


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_processes(workers: int | None) -> int:
    """The number of processes that do the work for an option `workers`: 0 is this process alone, None one per core."""
    return available_cores() if workers is None else max(workers, 1)


def in_worker() -> bool:
    """Whether this is a worker process, which should start no others."""
    return bool(_worker)


def become_worker() -> None:
    """Make this process, started by Leaktight or Ray, a worker with one thread that starts no other processes."""
    torch.set_num_threads(1)
    keep_freed()
    _worker["here"] = True


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread, as worker processes do, so that results are bitwise the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Processes:
    """Runs work in processes on this machine, even a single job, so that results do not depend on the number of jobs.

    number: of processes; None: one for every core. preload: modules that work needs, imported once for all processes.
    """

    number: int | None = None
    preload: tuple[str, ...] = ()

    @contextmanager
    def start(self, work: Work[J, M, R]) -> Iterator[Workers[J, M, R]]:
        context = _context([work.__module__, *self.preload])
        number = self.number or available_cores()
        data = without_examples(work)
        watched, life = context.Pipe(duplex=False)
        try:
            channel = context.SimpleQueue()
            pool = ProcessPoolExecutor(
                number, mp_context=context, initializer=_begin, initargs=(watched, channel, *data)
            )
        except OSError as error:  # their locks are in /dev/shm
            raise MachineError(
                f"cannot start worker processes: {error.strerror}; free space in /dev/shm, or use --workers 0"
            ) from error
        try:
            yield _Pool(pool, number, channel, life)
        except BaseException:
            _end(life)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            life.close()
            watched.close()
            channel.close()


@dataclass(frozen=True)
class Alone:
    """Runs work in this process as a worker would: on one thread and without starting processes. Nothing is pickled."""

    @contextmanager
    def start(self, work: Work[J, M, R]) -> Iterator[Workers[J, M, R]]:
        before = dict(_worker)
        with one_thread(), Inline().start(work) as workers:
            _worker["here"] = True
            try:
                yield workers
            finally:
                _worker.clear()
                _worker.update(before)


def on_this_machine(workers: int | None) -> Executor:
    """An executor with this many processes (None: one for every core); with none or one, it is this process."""
    number = num_processes(workers)
    return Inline() if number == 1 else Processes(number)


def run_all(
    work: Work[J, M, R],
    jobs: Iterable[J],
    *,
    workers: int,
    on_message: OnMessage[M] = ignored,
    done: Callable[[int, R], None] = ignored,
) -> list[R]:
    """The results of `work` on every job, in the order of the jobs.

    on_message: called with a job's index and a message of its work. done: called with its index and its result.
    With one worker or one job, this process does the work.
    """
    waiting = iter(jobs)
    first = list(islice(waiting, 2))
    with on_this_machine(workers if len(first) > 1 else 1).start(work) as started:
        return in_order(started.run(chain(first, waiting), on_message=on_message), done)


@dataclass(frozen=True)
class _Pool(Generic[J, M, R]):
    """The main process's side of the workers. life: a pipe; workers end when it is closed."""

    pool: ProcessPoolExecutor
    number: int
    channel: SimpleQueue[bytes]
    life: Connection

    def run(
        self, jobs: Iterable[J], *, shared: Sequence[object] = (), on_message: OnMessage[M] = ignored
    ) -> Generator[tuple[int, R], None, None]:
        common = [in_shared_memory(value) for value in shared]
        waiting = enumerate(jobs)
        running: dict[Future[bytes], int] = {}
        try:
            while True:
                while len(running) <= self.number and (following := next(waiting, None)) is not None:
                    place, job = following
                    running[self._submitted(place, dumped(job, shared), common)] = place
                if not running:
                    return
                finished, _ = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                while not self.channel.empty():
                    on_message(*loaded(self.channel.get()))
                for future in finished:
                    yield running.pop(future), loaded(future.result())
        except BrokenProcessPool as error:
            raise MachineError(
                "a worker process died (killed, or out of memory?); continue with --resume, or use fewer --workers; "
                'a script of your own needs `if __name__ == "__main__":` around its work'
            ) from error
        except BaseException:
            _end(self.life)
            raise

    def _submitted(self, place: int, job: bytes, common: list[Shared]) -> Future[bytes]:
        try:
            return self.pool.submit(_run, place, job, common)
        except (ConnectionError, EOFError) as error:  # of the process that starts workers, which was killed
            raise BrokenProcessPool(str(error)) from error


def _end(life: Connection) -> None:
    """End all workers at once."""
    if not isinstance(sys.excepthook, _Quiet):
        sys.excepthook = _Quiet(sys.excepthook)
    life.close()


class _Quiet:
    """A `sys.excepthook` without errors of the thread that sends shared tensors: a worker may end while it gets one."""

    def __init__(self, usual: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self.usual = usual

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if trace is None or trace.tb_frame.f_code.co_filename != resource_sharer.__file__:
            self.usual(kind, error, trace)


def _context(preload: list[str]) -> Any:
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(preload)
    return context


def _begin(life: Connection, channel: SimpleQueue[bytes], work: bytes, examples: list[Shared]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the main process handles it
    become_worker()
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    _worker["channel"], _worker["work"] = channel, loaded(work, [each.value() for each in examples])


def _end_with(life: Connection) -> None:
    """End this worker when the main process closes its end of the pipe, or dies."""
    parent = multiprocessing.parent_process()
    wait_for([life] if parent is None else [life, parent.sentinel])
    os._exit(1)


def _run(place: int, job: bytes, common: list[Shared]) -> bytes:
    """Do one job. Jobs, results and messages are bytes, as tensors in shared memory would use up file handles."""

    def tell(message: object) -> None:
        _worker["channel"].put(dumped((place, message)))

    try:
        shared = [each.value() for each in common]
        return dumped(_worker["work"](loaded(job, shared), tell))
    except Exception as error:
        raise_fault(error)  # here, as causes do not travel
        if _portable(error):
            raise
        raise LeaktightError(f"{type(error).__name__}: {error}") from None


def _portable(error: Exception) -> bool:
    """Whether an error can be pickled and unpickled; one that cannot would break the pool."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
