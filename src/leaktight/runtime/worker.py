"""What a process knows of being a worker: one thread, and no workers of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_this_process: set[str] = set()  # filled once, when a worker process starts; never in the main process


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_worker() -> bool:
    """Whether this is a worker process, which should start no others: the cores are taken."""
    return bool(_this_process)


def become_worker() -> None:
    """Make this process a worker, of Leaktight's own or of Ray's: one thread, and it starts no others."""
    torch.set_num_threads(1)
    _this_process.add("worker")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread, as worker processes do: the same bits whatever the number of processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
