"""Worker processes for clients: one thread each, as many as there are cores, the model sent through shared memory.

One process and many give the same numbers bit for bit: every computation runs on one thread, and results are handed
back in the order of the jobs.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from leaktight.core.errors import LeaktightError
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import Examples, Params
from leaktight.fl.wire import decode, encode

Job: TypeAlias = Mapping[str, Any]
"""What to do, and what came of it: values that `fl.wire` can carry."""


class Work(Protocol):
    """What a worker can do with the model that was broadcast and a job."""

    def __call__(self, params: Params, buffers: Params, job: Job) -> Job: ...


class Workers(Protocol):
    """Runs jobs on a model and gives the results in the order of the jobs; `done` is called after each."""

    def run(self, params: Params, buffers: Params, jobs: Sequence[Job], done: Callable[[], None]) -> list[Job]: ...


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def open_workers(work: Work, number: int) -> Iterator[Workers]:
    """Workers for as long as the block runs: in this process for one, in processes of their own for more."""
    if number == 1:
        with _one_thread():
            yield _Inline(work)
        return
    with _Pool(work, number) as pool, _one_thread():
        yield pool


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Inline:
    work: Work

    def run(self, params: Params, buffers: Params, jobs: Sequence[Job], done: Callable[[], None]) -> list[Job]:
        results = []
        for job in jobs:
            results.append(self.work(params, buffers, job))
            done()
        return results


class _Pool:
    def __init__(self, work: Work, number: int) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload([__name__])
        self.executor = ProcessPoolExecutor(
            number, mp_context=context, initializer=_start_worker, initargs=_shareable(work)
        )

    def __enter__(self) -> _Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.executor.shutdown(wait=kind is None, cancel_futures=True)

    def run(self, params: Params, buffers: Params, jobs: Sequence[Job], done: Callable[[], None]) -> list[Job]:
        packed = bytearray(pack({"params": params, "buffers": buffers}))
        model = torch.frombuffer(packed, dtype=torch.uint8).share_memory_()
        try:
            futures: list[Future[bytes]] = [self.executor.submit(_run_job, model, encode(job)) for job in jobs]
            for future in as_completed(futures):
                future.result()
                done()
            return [decode(future.result()) for future in futures]
        except BrokenProcessPool as error:
            raise LeaktightError(
                "a worker process died (killed, or out of memory?); continue with --resume, or use fewer --workers"
            ) from error


def _shareable(work: Work) -> tuple[bytes, list[Examples]]:
    """Work in a form that costs a worker nothing to hold: examples in shared memory, the rest copied."""
    pickler = _Pickler()
    pickler.dump(work)
    return pickler.data.getvalue(), pickler.shared


class _Pickler(pickle.Pickler):
    """Leaves examples out and notes their place. A process can be sent only so many shared tensors."""

    def __init__(self) -> None:
        self.data, self.shared = io.BytesIO(), list[Examples]()
        super().__init__(self.data)

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Examples):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the shared examples back in their places. Reads only what `_Pickler` of the parent process wrote."""

    def __init__(self, data: bytes, shared: list[Examples]) -> None:
        super().__init__(io.BytesIO(data))
        self.shared = shared

    def persistent_load(self, place: int) -> Examples:
        return self.shared[place]


_worker: dict[str, Work] = {}  # filled once, when a worker process starts; never in the main process


def _start_worker(data: bytes, shared: list[Examples]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the main process handles it
    torch.set_num_threads(1)
    _worker["work"] = _Unpickler(data, shared).load()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    """A worker must not outlive the process that started it, not even one that was killed."""
    parent.join()
    os._exit(1)


def _run_job(model: Tensor, job: bytes) -> bytes:
    received = unpack(model.numpy().tobytes())
    return encode(_worker["work"](received["params"], received["buffers"], decode(job)))
