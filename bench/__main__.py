"""Run the benchmarks that are named, or all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from bench import attacks, engine

BENCHMARKS: Mapping[str, Callable[[], None]] = {"engine": engine.main, "attacks": attacks.main}

if __name__ == "__main__":
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"unknown benchmark {unknown[0]!r}; choose from: {', '.join(BENCHMARKS)}")
    for name in names:
        print(f"== {name}")
        BENCHMARKS[name]()
