"""How things are timed: alternately, so that a busy machine slows both sides, and by the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def medians(candidates: Mapping[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """Median seconds of each candidate; the candidates take turns."""
    return {name: statistics.median(values) for name, values in turns(candidates, repeats, time.perf_counter).items()}


def fastest(candidates: Mapping[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """The fewest seconds that each candidate took of this process's own time; the candidates take turns.

    For differences of a few per cent, which a busy machine would bury: it can make work slower, but not faster.
    """
    return {name: min(values) for name, values in turns(candidates, repeats, time.process_time).items()}


def turns(
    candidates: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The seconds of every run after a first one that does not count."""
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return seconds
