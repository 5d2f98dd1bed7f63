"""Run the benchmarks that are named, or all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import attacks, defenses, engine, flower, paillier, secret, startup

BENCHMARKS: Mapping[str, Callable[[Path | None], None]] = {
    "engine": lambda plots: engine.main(),
    "attacks": attacks.main,
    "defenses": lambda plots: defenses.main(),
    "flower": lambda plots: flower.main(),
    "paillier": lambda plots: paillier.main(),
    "secret": lambda plots: secret.main(),
    "startup": lambda plots: startup.main(),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to put pictures; only attacks has some")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from: {', '.join(BENCHMARKS)}")
    for name in chosen.names or BENCHMARKS:
        print(f"== {name}")
        BENCHMARKS[name](chosen.plots)
