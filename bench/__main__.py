"""Run the benchmarks that are named, or all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import adaptive, attacks, calibration, defenses, engine, faults, flower, guard, paillier, secret, startup

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
    if sys.argv[1:2] == ["adaptive"]:
        adaptive.main(sys.argv[2:])
        sys.exit()
    if sys.argv[1:2] == ["faults"]:
        faults.main(sys.argv[2:])
        sys.exit()
    if sys.argv[1:2] == ["guard"]:
        guard.main(sys.argv[2:])
        sys.exit()
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = f"{', '.join(BENCHMARKS)}; not part of all: adaptive, faults, guard, or calibration, and which of "
    names += ", ".join(calibration.PARTS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to put pictures; only attacks has some")
    chosen = parser.parse_args()
    if chosen.names[:1] == ["calibration"]:
        wrong = [name for name in chosen.names[1:] if name not in calibration.PARTS]
        if wrong:
            parser.error(f"unknown calibration {wrong[0]!r}; choose from: {', '.join(calibration.PARTS)}")
        calibration.main(chosen.names[1:])
        parser.exit()
    unknown = [name for name in chosen.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from: {', '.join(BENCHMARKS)}")
    for name in chosen.names or BENCHMARKS:
        print(f"== {name}")
        BENCHMARKS[name](chosen.plots)
