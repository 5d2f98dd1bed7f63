"""Chooses how restarts run: as one function under vmap, in processes, or one after another; traced or compiled.

The result is the same up to rounding: every restart has its own random streams and ends by itself. Only with a network
that draws random numbers (dropout) does it differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from leaktight.attacks.matching.view import Evidence
from leaktight.attacks.optimizers.compile import Backend, BackendSetting, has_compiler
from leaktight.models.surgery import mode_of, working_bytes
from leaktight.runtime.memory import fitting

Parallel: TypeAlias = Literal["auto", "vmap", "processes", "none"]

# Measured on two cores: vmap gains 1.4 to 2.2 times below both bounds, and loses above 600 000 parameters, whose
# gradients per lane no cache holds. From `_QUICK` on, two processes gain more than vmap.
_FEW_PARAMETERS, _FEW_FLOPS, _QUICK = 3e5, 1e8, 2e7
_SECONDS_PER_STEP, _SECONDS_PER_FLOP = 2e-3, 3e-10
_WORTH_SECONDS = 10.0  # starting processes takes some seconds

# Measured on one core, from LeNet (four layers) to ResNet-20: a compiled step saves a quarter of a millisecond and more
# for each layer, and compiling takes 10 seconds and 1.5 more for each layer; longer if two workers do it at once.
_SAVED_PER_LAYER, _COMPILING, _COMPILING_PER_LAYER, _WORTH_COMPILING = 2.5e-4, 10.0, 1.5, 2.0
_MOST_LAYERS = 100  # what compiling more takes was not measured: many simulated steps make long graphs

_VICTIMS: ContextVar[int] = ContextVar("victims", default=1)


@dataclass(frozen=True)
class Workload:
    """The restarts of a search. steps: of each. abreast: whether vmap is possible. separable: whether processes are."""

    restarts: int
    steps: int
    abreast: bool
    separable: bool


def choose(load: Workload, evidence: Evidence, parallel: Parallel, workers: int) -> tuple[Parallel, int]:
    """How to run the restarts, and in how many processes. parallel: the setting. workers: the most processes."""
    if load.restarts == 1 or parallel == "none":
        return "none", 1
    if evidence.device.type != "cpu":  # one process, which fills the device
        return ("vmap" if load.abreast and parallel != "processes" else "none"), 1
    if parallel == "processes":
        return "processes", workers
    flops = flops_of(evidence)
    seconds = load.restarts * load.steps * (_SECONDS_PER_STEP + _SECONDS_PER_FLOP * flops)
    number = workers if seconds > _WORTH_SECONDS else 1
    if parallel == "vmap":
        return "vmap", number
    parameters = max(sum(tensor.numel() for tensor in view.params.values()) for _, view, _ in evidence.views)
    abreast = load.abreast and parameters <= _FEW_PARAMETERS and flops <= _FEW_FLOPS
    if number > 1 and load.separable and not (abreast and flops <= _QUICK):
        return "processes", number
    return ("vmap", number) if abreast else ("none", 1)


@contextmanager
def among(victims: int) -> Iterator[None]:
    """Searches in this block are told that as many victims of the same network are attacked in the same way.

    All share one compilation. None is compiled among 0.
    """
    token = _VICTIMS.set(victims)
    try:
        yield
    finally:
        _VICTIMS.reset(token)


def choose_backend(load: Workload, evidence: Evidence, backend: BackendSetting, graphs: int = 1) -> Backend:
    """How to run an iteration. backend: the setting. graphs: how many the search has, which are all compiled or none.

    By default a search is compiled if all victims together save twice the seconds that compiling takes. This depends on
    what is planned, not on what happens to be in the compiler's cache: results of the two differ in the last bits.
    """
    if backend != "auto":
        return backend
    if evidence.device.type != "cpu" or not has_compiler():
        return "fx"
    layers = layers_of(evidence)
    if layers > _MOST_LAYERS:
        return "fx"
    saved = _VICTIMS.get() * load.restarts * load.steps * layers * _SAVED_PER_LAYER
    compiling = graphs * (_COMPILING + _COMPILING_PER_LAYER * layers)
    return "inductor" if saved > _WORTH_COMPILING * compiling else "fx"


def layers_of(evidence: Evidence) -> int:
    """The matrices and kernels that one loss uses, over all views and simulated steps."""
    return sum(
        max(1, len(view.steps)) * sum(tensor.dim() > 1 for tensor in view.params.values())
        for _, view, _ in evidence.views
    )


def groups_of(load: Workload, evidence: Evidence, way: Parallel) -> list[list[int]]:
    """The restarts, in groups that are computed together: as many under vmap as the memory of the device holds."""
    numbers = list(range(load.restarts))
    if way == "processes" and load.separable:
        return [[number] for number in numbers]
    size = load.restarts
    if way == "vmap" and load.separable and evidence.device.type != "cpu":
        size = fitting(evidence.device, bytes_of(evidence), load.restarts)
    return [numbers[start : start + size] for start in range(0, load.restarts, size)]


def bytes_of(evidence: Evidence) -> int:
    """About the memory that one restart takes, over all views and simulated steps."""
    total = 0
    for _, view, places in evidence.views:
        number = max((len(step) for step, _ in view.steps), default=len(places))
        inputs = next(iter(view.params.values())).new_zeros(number, *evidence.shape)
        with mode_of(view.trainer.model, view.trainer.mode):
            own = working_bytes(view.trainer.model, view.params, view.buffers, inputs)
        total += max(1, len(view.steps)) * own
    return total


def flops_of(evidence: Evidence) -> float:
    """The floating-point operations of the forward passes of one loss, over all views and simulated steps."""
    total = 0.0
    for _, view, places in evidence.views:
        model = view.trainer.model
        inputs = next(iter(view.params.values())).new_zeros(len(places), *evidence.shape)
        with FlopCounterMode(display=False) as counter, torch.no_grad(), mode_of(model, view.trainer.mode):
            functional_call(model, (dict(view.params), dict(view.buffers)), (inputs,))
        seen = sum(len(step) for step, _ in view.steps) / len(places) if view.steps else 1.0
        total += counter.get_total_flops() * seen
    return total
