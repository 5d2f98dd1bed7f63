"""Processor time from the command to its answer, as a multiple of `import torch` in the same run."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

QUICK, PREPARED = 0.3, 1.6
"""What commands that do no work may take, and `audit --dry-run`, which loads data and builds the network.

The rehearsal of a dry run, whose time its document has, does not count.
"""

TORCH = ("-c", "import torch")
KINDS = ("attacks", "defenses", "models", "datasets", "partitions", "aggregators", "metrics", "labels", "generators")
CONFIGS = {
    "malformed TOML": "[audit\ntrials = 2\n",
    "unknown table": "[audits]\ntrials = 2\n",
    "unknown key": "[audit]\ntrails = 2\n",
    "wrong type of a value": '[audit]\ntrials = "many"\n',
    "value out of range": "[audit]\ntrials = 0\n",
    "unknown kind": '[model]\nkind = "lenet_zoo"\n',
    "unknown setting of a method": '[defense]\nkind = "noise"\nsdt = 0.1\n',
}


def cases(folder: Path) -> Mapping[str, tuple[int, Sequence[str]]]:
    """By name: the exit code that is expected, and the arguments of `python -m leaktight`."""
    for name, text in CONFIGS.items():
        _file(folder, name).write_text(text)
    return {
        "--help": (0, ("--help",)),
        **{f"list {kind}": (0, ("list", kind)) for kind in KINDS},
        "unknown option": (2, ("audit", "--trails", "3")),
        "unknown command": (2, ("adit",)),
        "unknown list": (2, ("list", "atacks")),
        "unknown attack": (2, ("audit", "--attack", "dgl", "--dry-run")),
        "unknown defense": (2, ("audit", "--defense", "otpost", "--dry-run")),
        "missing config file": (2, ("audit", str(folder / "none.toml"), "--dry-run")),
        "malformed --set": (2, ("audit", "--set", "audit.trials", "--dry-run")),
        **{name: (2, ("audit", str(_file(folder, name)), "--dry-run")) for name in CONFIGS},
        "audit --dry-run": (0, ("audit", "--dry-run", "--json")),
    }


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '_')}.toml"


def processor_seconds(arguments: Sequence[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """User and system time of one Python process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=_environment(), check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def rehearsal(printed: str) -> float:
    """The processor time of measuring, in the document of a dry run; 0 for other output."""
    try:
        return float(json.loads(printed)["rehearsal"])
    except (ValueError, TypeError, KeyError):
        return 0.0


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}  # idle threads that spin count as processor time


def imports_torch(arguments: Sequence[str]) -> bool:
    """Whether the command imports PyTorch."""
    _, done = processor_seconds(("-X", "importtime", "-m", "leaktight", *arguments))
    return any(line.rpartition("|")[2].strip() == "torch" for line in done.stderr.splitlines())


def main(repeats: int = 3) -> None:
    """Print a table; the commands take turns with `import torch`, and the median of each counts."""
    with tempfile.TemporaryDirectory() as name:
        commands = cases(Path(name))
        torch = [processor_seconds(TORCH)[0] for _ in range(2)][1:]  # the first fills the disk's cache
        seconds: dict[str, list[float]] = {command: [] for command in commands}
        for _ in range(repeats):
            torch.append(processor_seconds(TORCH)[0])
            for command, (code, arguments) in commands.items():
                spent, done = processor_seconds(("-m", "leaktight", *arguments))
                if done.returncode != code:
                    raise SystemExit(f"{command}: expected exit code {code}, got {done.returncode}: {done.stderr}")
                seconds[command].append(spent - rehearsal(done.stdout))
        base = statistics.median(torch)
        print(f"{'import torch':30} {base:6.2f} s")
        for command, values in seconds.items():
            ratio = statistics.median(values) / base
            bound = PREPARED if command == "audit --dry-run" else QUICK
            marks = ["imports torch"] if imports_torch(commands[command][1]) else []
            marks += [f"above {bound}"] if ratio > bound else []
            print(f"{command:30} {statistics.median(values):6.2f} s  {ratio:5.2f}  {', '.join(marks)}".rstrip())
