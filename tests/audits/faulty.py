"""A defense and an attack that meet a fault, once, if a file tells them so."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import leaktight as lt
from leaktight.core.protocols import Progress, Report
from leaktight.core.types import State

FAULTS = ("killed", "memory", "allocation", "disk", "wrapped", "size")
"""Faults of the machine; any other word is an error of the method."""


def meet(marker: str) -> None:
    """Meet the fault that the file `marker` names, and remove it."""
    file = Path(marker)
    if not file.exists():
        return
    fault = file.read_text()
    file.unlink()
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "memory":
        raise MemoryError
    if fault == "allocation":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
    if fault == "impossible":
        torch.empty(1 << 50)
    if fault == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/file")
    if fault == "wrapped":
        raise lt.LeaktightError("cannot save a table") from OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    if fault == "size":
        raise RuntimeError(f"unable to resize file </torch_1> to the right size: {os.strerror(errno.EFBIG)} (27)")
    if fault == "exit":
        raise SystemExit(0)
    if fault == "known":
        raise lt.LeaktightError("the update is empty")
    raise ValueError("a matrix is singular\x1b[2J\nsecond line")


@dataclass(frozen=True, kw_only=True)
class FaultyDefense(lt.Defense):
    """Sends what the client trained, halved."""

    marker: str = ""

    def on_update(self, update: lt.Update, state: State, *, rng: lt.Rng, report: Report) -> tuple[lt.Update, State]:
        meet(self.marker)
        halved = {name: tensor / 2 for name, tensor in update.tensors.items()}
        return lt.Update(halved, update.kind, update.num_examples, update.buffers), state


@dataclass(frozen=True, kw_only=True)
class FaultyAttack(lt.Attack):
    """Guesses noise."""

    marker: str = ""

    def reconstruct(
        self, seen: Sequence[lt.Observation], *, rng: lt.Rng, progress: Progress | None = None
    ) -> lt.Reconstruction:
        meet(self.marker)
        guess = torch.rand((1, *seen[0].inputs.shape), generator=rng.public())
        return lt.Reconstruction(lt.Batch(guess, torch.zeros(1, dtype=torch.long)), loss=0.5, first_loss=1.0)
