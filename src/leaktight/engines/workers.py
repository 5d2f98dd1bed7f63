"""Worker processes for clients: one thread each, as many as there are cores, the model sent through shared memory.

One process and many give the same numbers bit for bit: every computation runs on one thread, and results are handed
back in the order of the jobs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from leaktight.core.processes import Pool, available_cores, broken_pool_named, one_thread
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import Examples, Params
from leaktight.fl.wire import decode, encode

__all__ = ["Job", "Work", "Workers", "available_cores", "open_workers", "received", "shareable"]

Job: TypeAlias = Mapping[str, Any]
"""What to do, and what came of it: values that `fl.wire` can carry."""


class Work(Protocol):
    """What a worker can do with the model that was broadcast and a job."""

    def __call__(self, params: Params, buffers: Params, job: Job) -> Job: ...


class Workers(Protocol):
    """Runs jobs on a model and gives the results in the order of the jobs; `done` is called after each."""

    def run(self, params: Params, buffers: Params, jobs: Sequence[Job], done: Callable[[], None]) -> list[Job]: ...


@contextmanager
def open_workers(work: Work, number: int) -> Iterator[Workers]:
    """Workers for as long as the block runs: in this process for one, in processes of their own for more."""
    if number == 1:
        with one_thread():
            yield _Inline(work)
        return
    with Pool(number, start=_hold, args=shareable(work), preload=__name__) as pool, one_thread():
        yield _Pooled(pool)


@dataclass(frozen=True)
class _Inline:
    work: Work

    def run(self, params: Params, buffers: Params, jobs: Sequence[Job], done: Callable[[], None]) -> list[Job]:
        results = []
        for job in jobs:
            results.append(self.work(params, buffers, job))
            done()
        return results


@dataclass(frozen=True)
class _Pooled:
    pool: Pool

    def run(self, params: Params, buffers: Params, jobs: Sequence[Job], done: Callable[[], None]) -> list[Job]:
        packed = bytearray(pack({"params": params, "buffers": buffers}))
        model = torch.frombuffer(packed, dtype=torch.uint8).share_memory_()
        with broken_pool_named():
            futures: list[Future[bytes]] = [self.pool.submit(_run_job, model, encode(job)) for job in jobs]
            for future in as_completed(futures):
                future.result()
                done()
            return [decode(future.result()) for future in futures]


def shareable(work: Any) -> tuple[bytes, list[Examples]]:
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


def received(data: bytes, shared: list[Examples]) -> Any:
    """The work that `shareable` prepared, in a worker process."""
    return _Unpickler(data, shared).load()


def _hold(data: bytes, shared: list[Examples]) -> None:
    _worker["work"] = received(data, shared)


def _run_job(model: Tensor, job: bytes) -> bytes:
    sent = unpack(model.numpy().tobytes())
    return encode(_worker["work"](sent["params"], sent["buffers"], decode(job)))
