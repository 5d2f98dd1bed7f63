"""Faults of `leaktight audit`, each followed by `--resume` and compared bit for bit with an undisturbed run."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.audit_scene import TRIALS, Scene
from bench.faults.commands import Ended, end_group, own_mounts, workers_of
from bench.faults.count import Count

KILLS = 20
TERMS = 4
WORKERS_KILLED = 4
DISKS = ("40k", "120k", "200k", "280k", "340k", "380k")
LIMITS = (1_200, 6_000, 20_000, 34_000, 60_000)
DAMAGES = 6
SAME = "exit 1, one line with a remedy; after --resume the same bits"


@dataclass
class Campaign:
    """An undisturbed run to compare with, and a stream of random moments. seconds: that run's time."""

    scene: Scene
    moments: random.Random = field(default_factory=lambda: random.Random(17))
    undisturbed: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def begin(self) -> None:
        began = time.monotonic()
        done = self.scene.run("undisturbed")
        if done.code:
            raise SystemExit(f"the undisturbed run failed: {done.last}")
        self.seconds = time.monotonic() - began
        self.undisturbed = self.scene.results("undisturbed")

    def same(self, run: str, ended: Ended | None = None) -> bool:
        """Whether a finished run has the results of the undisturbed one. ended: how it ended; None: resume it now."""
        ended = ended or self.scene.run(run, "--resume")
        if ended.code:
            return self.note(f"{run} could not be resumed: {ended.last}")
        found = self.scene.results(run)
        differing = [key for key in found if found[key] != self.undisturbed[key]]
        return not differing or self.note(f"{run} differs in {', '.join(differing)}")

    def refused(self, run: str, ended: Ended, code: int, *words: str) -> bool:
        """Whether a run ended with one clear line, and nothing of the fault was stored as a result."""
        if self.scene.failed(run):
            return self.note(f"{run} stored failed trials")
        return ended.clear(code, *words) or self.note(f"{run} ended with {ended.code}: {ended.last}")

    def note(self, what: str) -> bool:
        self.wrong.append(what)
        return False

    def count(self, fault: str, wanted: str, held: list[bool], note: str = "") -> Count:
        told, self.wrong = [*([note] if note else []), *self.wrong], []
        return Count(fault, wanted, len(held), sum(held), "; ".join(told))


def counts() -> Iterator[Count]:
    """All faults, with the numbers above."""
    with tempfile.TemporaryDirectory(prefix="leaktight-faults-") as folder:
        campaign = Campaign(Scene(Path(folder)))
        campaign.begin()
        yield killed(campaign, KILLS)
        yield terminated(campaign, TERMS)
        yield worker_killed(campaign, "training, no defense: round 1", "while a defense is trained", WORKERS_KILLED)
        yield worker_killed(campaign, "1 of 10:", "while attacking", WORKERS_KILLED)
        if own_mounts():
            yield disk_full(campaign, DISKS)
            yield small_shm(campaign)
            yield no_shm(campaign)
        yield file_limit(campaign, LIMITS)
        yield damaged(campaign, DAMAGES)
        yield two_processes(campaign)


def killed(campaign: Campaign, number: int) -> Count:
    """SIGKILL to all processes at random moments of the run."""
    held, scene, done = [], campaign.scene, 0
    for place in range(number):
        run = f"killed-{place}"
        process = scene.start(run)
        time.sleep(campaign.moments.uniform(0, campaign.seconds))
        end_group(process)
        process.wait()
        file = scene.folder / run / "trials.jsonl"
        done += file.read_bytes().count(b"\n") if file.exists() else 0
        held.append(campaign.same(run))
    note = f"a run takes {campaign.seconds:.0f} s; on average {done / number:.1f} of {TRIALS} trials were done"
    return campaign.count("SIGKILL at a random moment", "after --resume the same bits", held, note)


def terminated(campaign: Campaign, number: int) -> Count:
    """SIGTERM to the main process, while training and while attacking."""
    held, scene = [], campaign.scene
    for place in range(number):
        run = f"terminated-{place}"
        process = scene.start(run)
        scene.wait_for(run, ("training, no defense: round 1", "1 of 10:")[place % 2], process)
        process.send_signal(signal.SIGTERM)
        ended = scene.wait(process, run)
        held.append(campaign.refused(run, ended, 1, "SIGTERM", "--resume") and campaign.same(run))
    return campaign.count("SIGTERM", SAME, held)


def worker_killed(campaign: Campaign, words: str, when: str, number: int) -> Count:
    """SIGKILL to one worker process as soon as the audit has printed these words."""
    held, scene = [], campaign.scene
    for place in range(number):
        run = f"worker-{when.split()[-1]}-{place}"
        process = scene.start(run)
        scene.wait_for(run, words, process)
        victims = workers_of(process)
        if not victims:
            held.append(campaign.note(f"{run} had no worker to kill"))
            continue
        os.kill(victims[place % len(victims)], signal.SIGKILL)
        ended = scene.wait(process, run)
        held.append(campaign.refused(run, ended, 1, "a worker process died", "--resume") and campaign.same(run))
    return campaign.count(f"a worker killed {when}", SAME, held)


def disk_full(campaign: Campaign, sizes: tuple[str, ...]) -> Count:
    """A file system of this size for the run, which is made larger before it is resumed."""
    held, scene = [], campaign.scene
    for size in sizes:
        run = f"disk-{size}"
        first, second = scene.in_own_mounts(
            f"mkdir -p small; mount -t tmpfs -o size={size} tmpfs small; audit small/{run};"
            f"mount -o remount,size=100m small; audit small/{run} --resume; cp -r small/{run} {run}-after"
        )
        clear = campaign.refused(f"{run}-after", first, 1, "No space left on device", "free space")
        held.append(clear and campaign.same(f"{run}-after", second))
    return campaign.count("the disk is full", SAME, held, f"disks of {', '.join(sizes)}")


def small_shm(campaign: Campaign) -> Count:
    """Too little shared memory for the data, and enough for locks: files are used."""
    scene = campaign.scene
    (ended,) = scene.in_own_mounts("mount -t tmpfs -o size=64k tmpfs /dev/shm; audit shm")
    return campaign.count("/dev/shm of 64 kB", "files are used; the same bits", [campaign.same("shm", ended)])


def no_shm(campaign: Campaign) -> Count:
    """No shared memory even for locks."""
    (ended,) = campaign.scene.in_own_mounts("mount -t tmpfs -o size=8k tmpfs /dev/shm; audit no-shm")
    held = campaign.refused("no-shm", ended, 1, "/dev/shm", "--workers 0") and campaign.same("no-shm")
    return campaign.count("/dev/shm of 8 kB, too small for a lock", SAME, [held])


def file_limit(campaign: Campaign, limits: tuple[int, ...]) -> Count:
    """No file may have more bytes than this."""
    held, scene = [], campaign.scene
    for limit in limits:
        run = f"limit-{limit}"
        ended = scene.run(run, limit=_limit(limit))
        clear = campaign.refused(run, ended, 1, "File too large", "ulimit -f")
        held.append(clear and campaign.same(run))
    return campaign.count("a limit of file sizes", SAME, held, f"limits of {', '.join(map(str, limits))} bytes")


def _limit(size: int) -> Callable[[], None]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def damaged(campaign: Campaign, number: int) -> Count:
    """A changed bit, or garbage, in the trials of a stopped run; then what the refusal says is done."""
    held, scene = [], campaign.scene
    process = scene.start("stopped")
    scene.wait_for("stopped", "5 of 10:", process)
    end_group(process)
    process.wait()
    whole = (scene.folder / "stopped" / "trials.jsonl").read_bytes()
    for place in range(number):
        run = f"damaged-{place}"
        shutil.copytree(scene.folder / "stopped", scene.folder / run)
        file = scene.folder / run / "trials.jsonl"
        lines = whole.splitlines(keepends=True)
        line = campaign.moments.randrange(len(lines) - 1)
        lines[line] = _garbled(lines[line], campaign.moments, garbage=place % 3 == 2)
        file.write_bytes(b"".join(lines))
        ended = scene.run(run, "--resume")
        clear = campaign.refused(run, ended, 2, f"trials.jsonl, line {line + 1}: ", "delete this line")
        file.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))
        held.append(clear and campaign.same(run))
    wanted = "exit 2 with file, line and remedy; after it and --resume the same bits"
    return campaign.count("a changed bit or garbage in trials.jsonl", wanted, held)


def _garbled(line: bytes, moments: random.Random, *, garbage: bool) -> bytes:
    if garbage:
        return moments.randbytes(40).replace(b"\n", b" ") + b"\n"
    damaged = bytearray(line)
    digits = [place for place, byte in enumerate(line) if chr(byte).isdigit()]
    damaged[moments.choice(digits)] ^= 1
    return bytes(damaged)


def two_processes(campaign: Campaign) -> Count:
    """A second audit in the folder of a running one, which is halted meanwhile."""
    scene = campaign.scene
    process = scene.start("two")
    scene.wait_for("two", "1 of 10:", process)
    end_group(process, signal.SIGSTOP)
    other = Scene(scene.folder, workers=0).run("two", "--resume")
    end_group(process, signal.SIGCONT)
    process.wait(timeout=600)
    refused = campaign.refused("two", other, 2, "another process is writing", "--out")
    held = refused and campaign.same("two", Ended(process.returncode, ""))
    return campaign.count("two processes in one folder", "the second is refused, the first undisturbed", [held])
