"""What Flower's simulation costs over the in-process engine for the same work: the start of Ray, and every round.

The federation of `bench.engine`: 10 clients of 500 colour images, LeNet-Zhu, one epoch each, a process per core.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from bench.engine import CLIENTS, federation
from leaktight.core.tensors import digest
from leaktight.engines import inprocess
from leaktight.engines.training import Engine
from leaktight.fl.federation import FederationState
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome
from leaktight.runtime.processes import available_cores

ROUNDS = 12


def timed(engine: Engine) -> tuple[float, float, str]:
    """Seconds until the end of the first round, of a later one (the median), and the model's digest."""
    ends = [time.perf_counter()]

    def note(outcome: RoundOutcome, state: FederationState) -> None:
        ends.append(time.perf_counter())

    whole = federation()
    longer = replace(whole, plan=FederationPlan(rounds=ROUNDS))
    server = engine(longer, workers=available_cores(), after_round=note).server
    rounds = [after - before for before, after in pairwise(ends[1:])]
    return ends[1] - ends[0], statistics.median(rounds), digest({**server.params, **server.buffers})


def main() -> None:
    from leaktight.engines.flower.simulation import simulate

    with tempfile.TemporaryDirectory() as folder:
        engines: dict[str, Engine] = {"in process": inprocess.run, "Flower": partial(simulate, folder=Path(folder))}
        results = {name: timed(engine) for name, engine in engines.items()}
    print(f"{CLIENTS} LeNet clients, {ROUNDS} rounds, {available_cores()} processes; scored every round")
    for name, (first, later, _) in results.items():
        print(f"{name:>11}: {first:6.1f} s to the end of the first round, {1000 * later:7.0f} ms for each later one")
    (here, _, one), (there, _, two) = results.values()
    print(f"Flower starts {there - here:.1f} s later; a round takes {_ratio(results):.2f} times as long")
    print(f"the models are {'equal to the bit' if one == two else 'NOT EQUAL'}")


def _ratio(results: dict[str, tuple[float, float, str]]) -> float:
    here, there = results.values()
    return there[1] / here[1]
