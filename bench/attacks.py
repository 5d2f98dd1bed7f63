"""The matching loop: one attack iteration under each backend, against a plain eager loop written well.

Milliseconds for one full iteration (objective, total variation, signed Adam, box, best so far), one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench import growth
from bench.rivals import breaching_loop, eager_loop, has_breaching
from bench.scenes import against, observation, peak_memory
from leaktight.attacks.labels.rules import Given
from leaktight.attacks.optimizers.compile import Backend
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.core.rng import Rng


@dataclass(frozen=True)
class Case:
    """A network, a batch and a number of restarts.

    target, over_breaching: the speed-up that is aimed at, over plain PyTorch and over breaching.
    iterations: of one of six stretches.
    """

    kind: str
    batch: int = 1
    restarts: int = 1
    target: float | None = None
    over_breaching: float | None = None
    iterations: int = 8


CASES = (
    Case("lenet_zhu", target=3.0, over_breaching=5.0, iterations=40),
    Case("lenet_zhu", batch=4, over_breaching=3.5, iterations=40),
    Case("lenet_zhu", restarts=8, target=6.0, over_breaching=10.0, iterations=12),
    Case("resnet20", target=2.0, over_breaching=3.0),
    Case("resnet20_4", target=1.35, over_breaching=2.5, iterations=2),
    Case("resnet18", over_breaching=2.5, iterations=2),
)


def compare(case: Case) -> None:
    seen = observation(case.kind, case.batch)
    attack = InvertingGradients(labels=Given(), restarts=case.restarts, parallel="vmap").matching()
    print(f"{case.kind} batch {case.batch} restarts {case.restarts}")
    loops = {"plain PyTorch": (eager_loop, case.target)}
    if has_breaching():
        loops["breaching"] = (breaching_loop, case.over_breaching)
    backends: tuple[Backend, ...] = ("fx", "inductor")
    for backend in backends:
        for name, (loop, target) in loops.items():
            rival = loop(seen, case.iterations)
            turns = against(replace(attack, backend=backend), seen, case.iterations, rival)
            each, theirs = 1000 * turns.ours / case.iterations / case.restarts, 1000 * turns.theirs / case.iterations
            goal = f"; target {target}x with inductor" if target else ""
            print(
                f"    {backend:>8} {each:7.2f} ms, begins after {turns.begun:.0f} s; {name} {theirs:7.2f} ms: "
                f"{theirs / each:.2f}x{goal}",
                flush=True,
            )
    for side in ("plain", *backends):
        before, most = peak_memory(hold, case, side)
        print(
            f"    {side:>8} needs {most - before:5.0f} MB on top of the {before:.0f} MB of an idle process", flush=True
        )


def hold(case: Case, side: str) -> None:
    """A few iterations, for their memory."""
    seen = observation(case.kind, case.batch)
    if side == "plain":
        eager_loop(seen, 3)()
        return
    backend: Backend = "inductor" if side == "inductor" else "fx"
    attack = InvertingGradients(labels=Given(), restarts=case.restarts, parallel="vmap", iterations=3, backend=backend)
    attack.reconstruct([seen], rng=Rng(0))


def main(plots: Path | None = None) -> None:
    """plots: a folder for the picture of how time grows."""
    torch.set_num_threads(1)
    for case in CASES:
        compare(case)
    found = growth.curves()
    growth.show(found)
    if plots is not None:
        print(f"    plotted in {growth.plot(found, plots)}")
