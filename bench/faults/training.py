"""Faults of `leaktight train` in one process group: killed processes, full disks, damaged files, poisoned rounds."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.faults.commands import Ended, workers_of
from bench.faults.count import Count
from leaktight.core.errors import CheckpointError
from leaktight.core.rng import Rng
from leaktight.engines.checkpoints import Checkpoints
from leaktight.results.folder import RunFolder

KILLS = 20
FLIPS = 20
TRIES = 3
DISKS = ("150k", "220k", "300k")
"""Sizes of the disks that run full: before the first checkpoint, and after some."""
POISON = '''
import os
from dataclasses import dataclass, replace
from leaktight.core.protocols import Defense

@dataclass(frozen=True)
class Poison(Defense):
    """In one round of the environment's choice a client sends -50 times its update."""

    def on_gradient(self, step, state, *, rng, report):
        return step.gradient, {"round": step.round + 1}

    def on_update(self, update, state, *, rng, report):
        if str(state["round"]) == os.environ.get("POISONED"):
            update = replace(update, tensors={name: -50 * each for name, each in update.tensors.items()})
        return update, state
'''


def counts() -> Iterator[Count]:
    with tempfile.TemporaryDirectory(prefix="leaktight-faults-") as folder:
        place = Path(folder)
        yield killed(Runs(place, rounds=4 * KILLS))
        few = Runs(place, rounds=6)
        yield worker_killed(Runs(place, rounds=60))
        yield disk_full(few)
        yield flipped(few)
        yield poisoned(few)
        yield two_processes(Runs(place, rounds=60))


@dataclass(frozen=True)
class Runs:
    """Runs of one scenario with one key, so that all of them have to end in the same model."""

    place: Path
    rounds: int

    def command(self, out: str, *words: str) -> list[str]:
        settings = (
            f"federation={{rounds={self.rounds}, per_round=2}}",
            "local.epochs=1",
            f"secret_seed={'ab' * 32}",
            "defense={kind='poison:Poison'}",
        )
        (self.place / "poison.py").write_text(POISON)
        chosen = [word for each in settings for word in ("--set", each)]
        start = [sys.executable, "-m", "leaktight", "train", *chosen, "--out", out, "--json"]
        return [*start, *(() if "--workers" in words else ("--workers", "1")), *words]

    def start(self, out: str, *words: str) -> subprocess.Popen[str]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            self.command(out, *words),
            cwd=self.place,
            stdout=quiet,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, out: str, *words: str, poisoned: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **({"POISONED": str(poisoned)} if poisoned else {})}
        return subprocess.run(
            self.command(out, *words), cwd=self.place, env=environment, capture_output=True, text=True, check=False
        )

    def whole(self) -> str:
        """The model of a run that nobody disturbs."""
        out = f"whole-{self.rounds}"
        return digest_of(self.run(out, *(("--resume",) if self.folder(out).started else ())))

    def folder(self, out: str) -> RunFolder:
        return RunFolder(self.place / out)

    def wait(self, out: str, process: subprocess.Popen[str], rounds: int = 1) -> None:
        """Wait until this many rounds are stored, or the process has ended."""
        while process.poll() is None and (self.folder(out).checkpoints or [0])[-1] < rounds:
            time.sleep(0.01)


def digest_of(done: subprocess.CompletedProcess[str]) -> str:
    """The hash of the model that a run printed; empty if it failed."""
    return str(json.loads(done.stdout)["model_digest"]) if done.returncode == 0 else ""


def killed(runs: Runs) -> Count:
    expected, draw = runs.whole(), Rng(1).public_numpy()
    readable = 0
    for _ in range(KILLS):
        before = (runs.folder("cut").checkpoints or [0])[-1]
        process = runs.start("cut", "--resume")
        if draw.uniform() < 0.8:  # else while it starts
            runs.wait("cut", process, before + 1)
            time.sleep(draw.uniform(0, 0.5))
        else:
            time.sleep(draw.uniform(0, 5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        readable += loads(runs.folder("cut"))
    same = digest_of(runs.run("cut", "--resume")) == expected != ""
    left = len(list((runs.place / "cut").rglob(".partial-*")))
    note = f"{runs.rounds} rounds; {left} partial files left after the last resume"
    return Count("SIGKILL at a random moment", "resumed to the same model, bit for bit", KILLS, readable * same, note)


def loads(folder: RunFolder) -> bool:
    try:
        Checkpoints(folder).newest()
    except CheckpointError:
        return False
    return True


def worker_killed(runs: Runs) -> Count:
    expected, held, notes = runs.whole(), 0, set()
    for number in range(TRIES):
        out = f"worker-{number}"
        process = runs.start(out, "--workers", "2")
        runs.wait(out, process, 2 + number)
        workers = workers_of(process)
        if workers:
            os.kill(workers[-1], signal.SIGKILL)
        _, errors = process.communicate()
        ended = Ended(process.returncode, errors)
        notes.add(ended.last.partition("; ")[0])
        held += ended.clear(1) and digest_of(runs.run(out, "--resume")) == expected
    wanted = "exit code 1, one line, and after --resume the same model"
    return Count("a worker process killed", wanted, TRIES, held, "; ".join(sorted(notes)))


def disk_full(runs: Runs) -> Count:
    expected, held, notes = runs.whole(), 0, []
    for size in DISKS:
        out = f"disk-{size}"
        (runs.place / out).mkdir()
        command = shlex.join(runs.command(f"{out}/run", "--resume"))
        script = (
            f"mount -t tmpfs -o size={size} tmpfs {out} && {command} > /dev/null 2> errors-{size}; "
            f"echo $? > code-{size}; mount -o remount,size=64m {out} && {command}"
        )
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script], cwd=runs.place, capture_output=True, text=True, check=False
        )
        code = runs.place / f"code-{size}"
        mounted = code.exists()
        errors = (runs.place / f"errors-{size}").read_text() if mounted else ""
        ended = Ended(int(code.read_text() or 0) if mounted else 0, errors)
        message = ended.last.partition("; ")[0] if mounted else "no tmpfs here"
        notes.append(f"{size}: {message.rpartition('/')[2]}")
        held += ended.clear(1) and digest_of(done) == expected
    wanted = "exit code 1, one line, and after --resume the same model"
    return Count("the disk runs full", wanted, len(DISKS), held, "; ".join(notes))


def flipped(runs: Runs) -> Count:
    expected, held, draw = runs.whole(), 0, Rng(2).public_numpy()
    folder = runs.folder(f"whole-{runs.rounds}")
    for number in range(FLIPS):
        path = (folder.checkpoint if number % 2 else folder.private)(folder.checkpoints[-1])
        content = bytearray(path.read_bytes())
        content[int(draw.integers(len(content)))] ^= 1 << int(draw.integers(8))
        kept, _ = path.read_bytes(), path.write_bytes(content)
        done = runs.run(folder.path.name, "--resume")
        held += Ended(done.returncode, done.stderr).clear(1, "--from-round")
        path.write_bytes(kept)
    path.write_bytes(content)
    back = digest_of(runs.run(folder.path.name, "--resume", "--from-round", str(runs.rounds))) == expected
    note = f"after --from-round {runs.rounds} {'the same model' if back else 'ANOTHER model'}"
    return Count("a bit of a checkpoint flipped", "refused in one line, with a remedy", FLIPS, held, note)


def poisoned(runs: Runs) -> Count:
    expected, rounds = runs.whole(), [runs.rounds, runs.rounds - 1, 1]
    held = 0
    for number in rounds:
        out = f"poisoned-{number}"
        spoiled = digest_of(runs.run(out, poisoned=number))
        back = digest_of(runs.run(out, "--resume", "--from-round", str(number)))
        held += spoiled != expected == back
    note = f"rounds {', '.join(map(str, rounds))} of {runs.rounds}"
    return Count("a poisoned round", "--from-round gives the model of a clean run", len(rounds), held, note)


def two_processes(runs: Runs) -> Count:
    expected, held = runs.whole(), 0
    for number in range(TRIES):
        out = f"two-{number}"
        first = runs.start(out)
        runs.wait(out, first)
        second = runs.run(out, "--resume")
        alone = first.poll() is not None
        first.communicate()
        refused = Ended(second.returncode, second.stderr).clear(2, "another process is writing")
        held += (refused or alone) and digest_of(runs.run(out, "--resume")) == expected
    return Count("two processes on one folder", "the second is refused, the first is not disturbed", TRIES, held)
