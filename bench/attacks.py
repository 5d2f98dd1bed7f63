"""The matching loop: one attack iteration under each backend, against a plain eager loop written well.

Milliseconds for one full iteration (objective, total variation, signed Adam, box, best so far), one thread.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from bench.timing import medians
from leaktight.attacks.labels import Given
from leaktight.attacks.matched import OneBatch, Simulation
from leaktight.attacks.matching import Matching
from leaktight.attacks.presets import InvertingGradients
from leaktight.core.rng import Rng
from leaktight.core.tasks import Classification
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, ImageShape, Observation, Update, UpdateKind
from leaktight.fl.local import Trainer, local_update
from leaktight.models import MODELS, build_model

COLOUR = ImageShape(3, 32, 32)


@dataclass(frozen=True)
class Case:
    """A network, a batch and a number of restarts, with the speed-up that is aimed at."""

    kind: str
    batch: int = 1
    restarts: int = 1
    inductor: bool = True
    target: float | None = None
    iterations: int = 40


CASES = (
    Case("lenet_zhu", target=3.0, iterations=200),
    Case("lenet_zhu", batch=4, iterations=200),
    Case("lenet_zhu", restarts=8, target=6.0, iterations=60),
    Case("resnet20", target=2.0),
    Case("resnet20_4", target=1.35, iterations=10),
)


def observation(kind: str, batch: int, shape: ImageShape = COLOUR, local: LocalTraining | None = None) -> Observation:
    generator = Rng(0).torch()
    model = build_model(MODELS[kind](), shape, 10, init="default", rng=Rng(0))
    images = torch.rand((batch, *shape), generator=generator)
    labels = torch.arange(batch) % 10
    params, buffers = parameters_of(model), buffers_of(model)
    training = local or LocalTraining(batch_size=batch)
    size = training.batch_size
    steps = [Batch(images[start : start + size], labels[start : start + size]) for start in range(0, batch, size)]
    result = local_update(
        Trainer(model, training), params, buffers, steps, learning_rates=[training.learning_rate] * len(steps)
    )
    kind_of_update: UpdateKind = "gradient" if local is None else "delta"
    return Observation(
        model=model,
        task=Classification(),
        broadcast=Broadcast(params, buffers, 0),
        update=Update(result.update(params, kind_of_update), kind_of_update, batch),
        input_shape=shape,
        num_classes=10,
        labels=labels,
        batch_size=batch,
        local_training=training,
        mode="train",
    )


def eager_loop(seen: Observation, iterations: int) -> Callable[[], None]:
    """Inverting Gradients in plain PyTorch: no tracing, but nothing wasteful either."""
    model: nn.Module = seen.model
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    target = [seen.update.tensors[name] for name, _ in model.named_parameters()]
    norm = torch.stack([tensor.square().sum() for tensor in target]).sum().sqrt()
    assert seen.labels is not None
    labels = seen.labels

    def run() -> None:
        model.train()
        guess = torch.rand((len(labels), *seen.input_shape), generator=Rng(0).torch()).requires_grad_()
        optimizer = torch.optim.Adam([guess], lr=0.025)
        best, best_loss = guess.detach().clone(), torch.tensor(float("inf"))
        for _ in range(iterations):
            gradient = torch.autograd.grad(F.cross_entropy(model(guess), labels), params, create_graph=True)
            dot = torch.stack([(a * b).sum() for a, b in zip(gradient, target, strict=True)]).sum()
            size = torch.stack([a.square().sum() for a in gradient]).sum().sqrt()
            rows = (guess[:, :, 1:] - guess[:, :, :-1]).abs().mean()
            columns = (guess[:, :, :, 1:] - guess[:, :, :, :-1]).abs().mean()
            loss = 1 - dot / (size * norm) + 4e-4 * (rows + columns)
            (slope,) = torch.autograd.grad(loss, guess)
            with torch.no_grad():
                better = loss < best_loss
                best, best_loss = torch.where(better, guess, best), torch.where(better, loss, best_loss)
            guess.grad = slope.sign()
            optimizer.step()
            with torch.no_grad():
                guess.clamp_(0, 1)

    return run


def per_iteration(attack: Matching, seen: Observation, iterations: int) -> float:
    """Median seconds of one iteration over five stretches, without tracing and compiling."""
    stretch = max(iterations // 5, 1)
    moments: list[float] = []
    replace(attack, iterations=6 * stretch, progress_every=stretch).reconstruct(
        [seen], rng=Rng(0), progress=lambda iteration, loss, guess: moments.append(time.perf_counter())
    )
    return statistics.median(after - before for before, after in pairwise(moments)) / stretch


def compare(case: Case) -> None:
    seen = observation(case.kind, case.batch)
    attack = InvertingGradients(labels=Given(), restarts=case.restarts).matching()
    plain = medians({"eager loop": eager_loop(seen, case.iterations)}, repeats=3)["eager loop"] / case.iterations
    line = f"{case.kind:>12} batch {case.batch} restarts {case.restarts}: eager loop {1000 * plain:7.2f} ms"
    for backend in ("fx", "inductor") if case.inductor else ("fx",):
        each = per_iteration(replace(attack, backend=backend), seen, case.iterations) / case.restarts
        line += f", {backend} {1000 * each:7.2f} ms ({plain / each:.2f}x)"
    goal = f"; target {case.target}x" if case.target else ""
    print(f"{line}{goal}", flush=True)


def growth() -> None:
    """How time grows with the batch, the image and the number of local steps (fx backend)."""
    base = InvertingGradients(labels=Given()).matching()
    for batch in (1, 2, 4, 8, 16):
        milliseconds = 1000 * per_iteration(base, observation("lenet_zhu", batch), 40)
        print(f"    LeNet, batch {batch:>2}: {milliseconds:7.2f} ms")
    for side in (16, 32, 64, 128):
        seen = observation("lenet_zhu", 1, ImageShape(3, side, side))
        print(f"    LeNet, {side:>3}x{side:<3}: {1000 * per_iteration(base, seen, 40):7.2f} ms")
    for steps in (1, 2, 4, 8):
        seen = observation("lenet_zhu", 8, local=LocalTraining(batch_size=8 // steps, learning_rate=1e-4))
        times = [
            1000 * per_iteration(replace(base, matched=matched), seen, 40) for matched in (Simulation(), OneBatch())
        ]
        print(f"    LeNet, 8 images, {steps} steps: simulated {times[0]:7.2f} ms, one batch {times[1]:7.2f} ms")


def main() -> None:
    torch.set_num_threads(1)
    for case in CASES:
        compare(case)
    growth()
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
