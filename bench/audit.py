"""The processor time of the built-in audit, with four times the victims, and that of an older checkout."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parents[1]
VICTIMS = 5
"""The first look of an audit without a config."""
TIMES = 4


@dataclass(frozen=True)
class Measured:
    """seconds: of the processor, in all processes. psnr: the mean of each attack on each defense."""

    trials: int
    seconds: float
    psnr: Mapping[str, float]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench audit", description=__doc__)
    parser.add_argument("--victims", type=int, default=VICTIMS, help="of each attack on each defense (default: 5)")
    parser.add_argument("--against", type=Path, metavar="PATH", help="an older checkout, to be compared with")
    parser.add_argument("--seed", type=int, default=0, help="of the victims, the same for all runs (default: 0)")
    given = parser.parse_args(arguments)
    runs = {"present": (HERE, given.victims), f"present, {TIMES} x": (HERE, TIMES * given.victims)}
    if given.against is not None:
        runs = {"older": (given.against.resolve(), given.victims), **runs}
    found = {}
    for name, (checkout, victims) in runs.items():
        found[name] = measure(checkout, victims, given.seed)
        trials, seconds = found[name].trials, found[name].seconds
        against = seconds / next(iter(found.values())).seconds
        each = 1000 * seconds / trials
        print(
            f"{name:12} {trials:5} trials {seconds:7.1f} s of the processor {each:5.0f} ms each {against:5.2f}",
            flush=True,
        )
    print("mean PSNR")
    for cell in next(iter(found.values())).psnr:
        print(f"{cell:50}", *(f"{name} {each.psnr[cell]:5.1f} dB" for name, each in found.items()), sep="  ")


def measure(checkout: Path, victims: int, seed: int) -> Measured:
    """Run the built-in audit of a checkout in one process of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        seeds = ["--set", f"seed={seed}", "--set", f'secret_seed="{seed:064x}"']
        command = ["audit", "--trials", str(victims), "--workers", "0", *seeds, "--json"]
        before = _seconds()
        done = subprocess.run(
            [sys.executable, "-m", "leaktight", *command, "--out", f"{folder}/run"],
            env={**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            check=True,
            cwd=folder,
        )
        seconds = _seconds() - before
    cells = json.loads(done.stdout)["cells"]
    psnr = {_name(cell): cell["psnr"]["mean"] for cell in cells if cell["role"] == "attack"}
    return Measured(sum(cell["trials"] for cell in cells), seconds, psnr)


def _name(cell: Mapping[str, object]) -> str:
    knowing = ", knowing it" if cell["adaptive"] else ""
    return f"{cell['attack']} on {cell['defense']}{knowing} ({cell['track']})"


def _seconds() -> float:
    """The processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
