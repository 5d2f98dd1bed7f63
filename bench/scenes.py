"""Observations of one update, and how an attack on them is timed and weighed."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from leaktight.attacks.matching.attack import Matching
from leaktight.config.catalogue import MODELS
from leaktight.core.inputs import Images
from leaktight.core.rng import Rng
from leaktight.core.tasks import Classification
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Mode, Observation, Update, UpdateKind
from leaktight.fl.local import Trainer, local_update
from leaktight.models.initialise import build_model

T = TypeVar("T")

COLOUR = Images(3, 32, 32)


def observation(
    kind: str, batch: int, shape: Images = COLOUR, local: LocalTraining | None = None, seed: int = 0
) -> Observation:
    """The gradient of random images on an untrained network or, given `local`, the change after that training."""
    generator = Rng(seed).public()
    model = build_model(MODELS[kind](), shape, 10, init="default", rng=Rng(seed))
    images = torch.rand((batch, *shape.shape), generator=generator)
    return observed(model, Batch(images, torch.arange(batch) % 10), local)


def observed(model: nn.Module, batch: Batch, local: LocalTraining | None = None, mode: Mode = "train") -> Observation:
    """The same of these images and this network, which has ten classes."""
    params, buffers = parameters_of(model), buffers_of(model)
    number = len(batch)
    training = local or LocalTraining(batch_size=number)
    size = training.batch_size
    steps = [
        Batch(batch.inputs[start : start + size], batch.targets[start : start + size])
        for start in range(0, number, size)
    ]
    rates = [training.learning_rate] * len(steps)
    result = local_update(Trainer(model, training, mode=mode), params, buffers, steps, learning_rates=rates)
    kind: UpdateKind = "gradient" if local is None else "delta"
    return Observation(
        model=model,
        task=Classification(),
        broadcast=Broadcast(params, buffers, 0),
        update=Update(result.update(params, kind), kind, number),
        inputs=Images(*batch.inputs.shape[1:]),
        num_classes=10,
        labels=batch.targets,
        batch_size=number,
        local_training=training,
        mode=mode,
    )


class Turns(NamedTuple):
    """Median seconds of a stretch of an attack and of its rival. begun: seconds until the attack's first stretch ended,
    with tracing and compiling, by the clock on the wall: a compiler is a process of its own."""

    ours: float
    theirs: float
    begun: float


def against(attack: Matching, seen: Observation, iterations: int, rival: Callable[[], None]) -> Turns:
    """The time of a stretch of `iterations` of the attack, without tracing and compiling, and of the rival.

    The two take turns, and only this process's own time counts, so that a busy machine slows both alike.
    """
    ours: list[float] = []
    theirs: list[float] = []
    since: list[float] = []
    began, begun = time.perf_counter(), 0.0

    def turn(iteration: int, loss: float, guess: object) -> None:
        nonlocal begun
        now = time.process_time()
        if since:  # the first stretch compiles
            ours.append(now - since[-1])
        else:
            begun = time.perf_counter() - began
        rival()
        theirs.append(time.process_time() - now)
        since.append(time.process_time())

    attack = replace(attack, iterations=6 * iterations, progress_every=iterations)
    attack.reconstruct([seen], rng=Rng(0), progress=turn)
    return Turns(statistics.median(ours), statistics.median(theirs), begun)


def per_iteration(attack: Matching, seen: Observation, iterations: int) -> float:
    """Median seconds of one iteration, without tracing and compiling."""
    stretch = max(iterations // 5, 1)
    return against(attack, seen, stretch, lambda: None).ours / stretch


def alone(work: Callable[..., T], *args: object) -> T:
    """The result of a function of a module, in a process of its own with one thread."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        return pool.submit(work, *args).result()


def peak_memory(work: Callable[..., None], *args: object) -> tuple[float, float]:
    """The most memory, in MB, that a process of its own held before and after `work`, a function of a module."""
    return alone(_weigh, work, args)


def _weigh(work: Callable[..., None], args: tuple[object, ...]) -> tuple[float, float]:
    before = _most_memory()
    work(*args)
    return before, _most_memory()


def _most_memory() -> float:
    """Of this process, in MB. Linux counts a parent's memory in `getrusage`, so its own file is read there."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
