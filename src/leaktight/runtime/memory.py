"""How much work fits into the memory of an accelerator at once, as processes or lanes."""

from __future__ import annotations

import torch

from leaktight.core.devices import free_memory
from leaktight.runtime.processes import available_cores

_USABLE = 0.8  # of the free memory; the rest is for fragments and for what an estimate leaves out
_CONTEXT = 1 << 29  # bytes that a process takes on a GPU before it does any work


def fitting(device: torch.device, each: int, most: int) -> int:
    """How many pieces of work of `each` bytes a device holds at once: from 1 to `most`, and `most` on the CPU."""
    free = free_memory(device)
    return most if free is None else max(1, min(most, int(_USABLE * free) // max(each, 1)))


def processes_on(device: torch.device, each: int) -> int | None:
    """How many worker processes of `each` bytes of work a device holds; None on the CPU: one for every core."""
    return None if device.type == "cpu" else fitting(device, _CONTEXT + each, available_cores())
