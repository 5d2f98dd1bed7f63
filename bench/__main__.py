"""Run the benchmarks that are named, or all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import (
    adaptive,
    attacks,
    audit,
    calibration,
    defenses,
    encrypted_round,
    encryption,
    engine,
    faults,
    flower,
    guard,
    labels,
    large,
    quality,
    robust,
    secret,
    spear,
    startup,
)

BENCHMARKS: Mapping[str, Callable[[Path | None], None]] = {
    "engine": lambda plots: engine.main(),
    "attacks": attacks.main,
    "defenses": lambda plots: defenses.main(),
    "flower": lambda plots: flower.main(),
    "encryption": encryption.main,
    "secret": lambda plots: secret.main(),
    "startup": lambda plots: startup.main(),
    "large": lambda plots: large.main(),
}

OWN_ARGUMENTS: Mapping[str, Callable[[list[str]], None]] = {
    "adaptive": adaptive.main,
    "audit": audit.main,
    "faults": faults.main,
    "guard": guard.main,
    "labels": labels.main,
    "quality": quality.main,
    "robust": robust.main,
    "spear": spear.main,
}
"""Campaigns with arguments of their own, which are not part of all."""

if __name__ == "__main__":
    if sys.argv[1:3] == ["encryption", "round"]:
        encrypted_round.main(sys.argv[3:])
        sys.exit()
    if sys.argv[1:2] and sys.argv[1] in OWN_ARGUMENTS:
        OWN_ARGUMENTS[sys.argv[1]](sys.argv[2:])
        sys.exit()
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = f"{', '.join(BENCHMARKS)}; not part of all: {', '.join(OWN_ARGUMENTS)}, or calibration, and which of "
    names += ", ".join(calibration.PARTS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to put pictures of attacks and encryption")
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
