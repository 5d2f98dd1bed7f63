"""How things are timed: alternately, so that a busy machine slows both sides, and by the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def medians(candidates: Mapping[str, Callable[[], object]], repeats: int = 7) -> dict[str, float]:
    """Median seconds of each candidate; the candidates take turns."""
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
