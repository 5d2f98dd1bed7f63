"""Commands that are disturbed: how one ended, its worker processes, signals to all of them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and what it printed on standard error."""

    code: int
    errors: str

    @property
    def last(self) -> str:
        return (self.errors.strip().splitlines() or [""])[-1]

    def clear(self, code: int, *words: str) -> bool:
        """Whether it ended with this code and one line that has these words, without a traceback."""
        line = self.last.startswith("leaktight: ") and all(word in self.last for word in words)
        return self.code == code and line and "Traceback" not in self.errors


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The worker processes of a running audit: the children of its children."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if words[0] != "Z":
            parents[int(status.parent.name)] = int(words[1])
    children = {child for child, parent in parents.items() if parent == process.pid}
    return sorted(child for child, parent in parents.items() if parent in children)


def end_group(process: subprocess.Popen[str], how: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to an audit and all its processes."""
    try:
        os.killpg(process.pid, how)
    except ProcessLookupError:
        return


def own_mounts() -> bool:
    """Whether this user may mount file systems of its own."""
    command: Sequence[str] = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        return False
