"""Run a command on a hostile input in a process of its own, and judge what it did.

The processes are forked from one that has imported everything, because a start takes seconds.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.faults.hostile.case import Case

SECONDS = 20.0
"""The longest that an answer may take."""
BYTES = 1.5e9
"""The most memory that it may take beyond that of the program."""
_DEADLINE = 40.0
_TO_MAKE = 240.0
_SLOW = (
    "api.inspect",
    "api.audit",
    "api.train",
    "cli.audit_display",
    "cli.inspect_display",
    "report.html",
    "data.sources",
)


@dataclass(frozen=True)
class Outcome:
    """What a command did. code: its exit code, negative for a signal. peak: its most memory beyond the program's.

    escaped: whether it wrote outside of its folder, or ran code of the input.
    """

    code: int
    said: str
    seconds: float
    peak: int
    escaped: bool

    @property
    def last(self) -> str:
        """The last line that it said."""
        return (self.said.strip().split("\n") or [""])[-1]

    def faults(self, case: Case) -> list[str]:
        """What is wrong with it; empty if all is well."""
        found = []
        if "Traceback (most recent call last)" in self.said:
            found.append(f"traceback: {self.last[:120]}")
        elif self.code not in case.codes:
            found.append("no answer in time" if self.code == -signal.SIGKILL else f"exit code {self.code}")
        elif self.code and not (case.names in self.last and self.last.startswith("leaktight: ")):
            found.append(f"does not name {case.names}: {self.last[:200]}")
        elif self.code and not any(sign in self.last for sign in (";", "expected", "should be", "unable to parse")):
            found.append(f"no remedy: {self.last[:200]}")
        if len(self.last) > 3000:
            found.append(f"a line of {len(self.last)} characters")
        if any(not letter.isprintable() and letter != "\n" for letter in self.said):
            found.append("control characters in the terminal")
        if self.escaped:
            found.append("wrote outside of its folder, or ran code")
        if self.seconds > SECONDS:
            found.append(f"{self.seconds:.0f} s")
        if self.peak > BYTES:
            found.append(f"{self.peak / 1e9:.1f} GB")
        return found


def warm() -> None:
    """Import what commands import when they run."""
    for name in _SLOW:
        importlib.import_module(f"leaktight.{name}")


def run(case: Case) -> Outcome:
    """Make the input in a scratch folder and run the command on it."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as place:
        folder = Path(place) / "given"
        folder.mkdir()
        command = Path(place) / "command"
        _, _, failed = _forked(lambda: _written(command, case.make(folder)), Path(place) / "made", _TO_MAKE)
        if not command.exists():
            raise RuntimeError(f"{case.id} could not be made: {failed}")
        words = command.read_text().split("\0")
        before = sorted(Path(place).iterdir())
        began = time.monotonic()
        code, usage, said = _forked(lambda: _command(words, folder), Path(place) / "said")
        seconds = time.monotonic() - began
        after = sorted(path for path in Path(place).iterdir() if path.name != "said")
        escaped = after != before or (folder / "ran").exists()
        return Outcome(code, said, seconds, max(usage.ru_maxrss * 1024 - _base(), 0), escaped)


@cache
def _base() -> int:
    """The memory of a command that reads nothing."""
    with tempfile.TemporaryDirectory() as place:
        usage = _forked(lambda: _command(["--version"], Path(place)), Path(place) / "said")[1]
    return usage.ru_maxrss * 1024


def _written(command: Path, words: Sequence[str]) -> None:
    command.write_text("\0".join(words))


def _command(words: Sequence[str], folder: Path) -> None:
    os.chdir(folder)
    sys.argv = ["leaktight", *words]
    if words[0] == "-c":
        sys.argv = list(words[1:])
        exec(words[1], {"__name__": "__main__"})  # the program of the case, not of the input
        return
    from leaktight.cli.app import main

    main()


def _forked(work: Callable[[], None], said: Path, most: float = _DEADLINE) -> tuple[int, resource.struct_rusage, str]:
    """The exit code of `work` in a process of its own, what it used, and what it printed."""
    child = os.fork()
    if child == 0:
        _end(work, said)
    deadline = time.monotonic() + most
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage, said.read_text(errors="replace")
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.005)


def _end(work: Callable[[], None], said: Path) -> None:
    """Run `work` with its output in a file, then leave this process."""
    target = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    code = 1
    try:
        work()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
