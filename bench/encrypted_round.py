"""One encrypted round of `leaktight train` with a large network and few data: time, and memory of all its processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INPUTS, CLASSES, CLIENTS = 1024, 10, 2
CONFIG = """
seed = 0
[data]
kind = "digits"
[partition]
kind = "iid"
clients = {clients}
validation = 0.0
[model]
kind = "mlp"
hidden = [{hidden}, {hidden}]
[local]
samples = 16
batch_size = 16
learning_rate = 0.01
[federation]
rounds = 1
per_round = {clients}
aggregator = {{kind = "encrypted", cipher = {{kind = "{cipher}"}}}}
"""
_POLL = 0.2


@dataclass(frozen=True)
class Cost:
    """Of a run: seconds of all of it and of the round, the most memory in bytes, and bytes sent by all clients."""

    parameters: int
    seconds: float
    round_seconds: float
    memory: int
    bytes_up: int


def measured(cipher: str, parameters: int, *extra: str) -> Cost:
    """A run with about so many parameters. extra: options of the command line."""
    middle = INPUTS + CLASSES + 2
    hidden = round((math.sqrt(middle**2 + 4 * (parameters - CLASSES)) - middle) / 2)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "round.toml")
        config.write_text(CONFIG.format(clients=CLIENTS, hidden=hidden, cipher=cipher))
        start = time.perf_counter()
        command = [sys.executable, "-m", "leaktight", "train", str(config), "--out", f"{folder}/run", "--json", *extra]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        watch = _Watch(run.pid)
        watch.start()
        output, _ = run.communicate()
        watch.stop()
        if run.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {run.returncode}")
        (row,) = json.loads(output)["rounds"]
    count = hidden * hidden + middle * hidden + CLASSES
    return Cost(count, time.perf_counter() - start, row["seconds"], watch.most, row["bytes_up"])


class _Watch(threading.Thread):
    """Adds up the memory of a process and its descendants again and again; what they share is counted once (PSS)."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.most, self._ended = process, 0, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(_POLL):
            self.most = max(self.most, sum(_memory(each) for each in _family(self.process)))

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _family(process: int) -> Iterator[int]:
    """A process and all that descend from it; those that end meanwhile are left out."""
    yield process
    for task in _read(f"/proc/{process}/task", listed=True):
        for child in _read(f"/proc/{process}/task/{task}/children"):
            yield from _family(int(child))


def _memory(process: int) -> int:
    """Bytes in memory, of pages that several processes share its part."""
    words = _read(f"/proc/{process}/smaps_rollup")
    return 1024 * int(words[words.index("Pss:") + 1]) if "Pss:" in words else 0


def _read(path: str, *, listed: bool = False) -> list[str]:
    try:
        return os.listdir(path) if listed else Path(path).read_text().split()
    except (OSError, ProcessLookupError):
        return []


def main(arguments: list[str]) -> None:
    """CIPHER PARAMETERS, and options of `leaktight train`."""
    cost = measured(arguments[0], int(arguments[1]), *arguments[2:])
    print(
        f"{arguments[0]}: {cost.parameters} parameters, {CLIENTS} clients, one round: {cost.seconds:.0f} s in all, "
        f"the round {cost.round_seconds:.0f} s, at most {cost.memory / 1e9:.2f} GB in memory, "
        f"{cost.bytes_up / CLIENTS / 1e6:.0f} MB from each client"
    )
