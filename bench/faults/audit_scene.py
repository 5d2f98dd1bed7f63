"""A small audit on the real command line, and what is compared of two runs of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.audits.scenes import SMALL

from bench.faults.commands import Ended

SETTINGS = (
    f"secret_seed={'ab' * 32}",
    "federation.rounds=6",
    "audit.attack_round=5",
    "attack.csdlg.iterations=3",
)
"""Two trainings of five rounds (no defense, noise), then ten trials: a second or two of work."""
TRIALS = 10
_OF_THE_CALL = ("run", "command", "digest", "spending", "answer")


@dataclass(frozen=True)
class Scene:
    """A folder with the config, in which runs have folders of their own."""

    folder: Path
    workers: int = 2

    def command(self, run: str, *more: str) -> list[str]:
        chosen = [word for each in SETTINGS for word in ("--set", each)]
        words = ["audit", "audit.toml", *chosen, "--json", "--workers", str(self.workers), "--out", run]
        return [sys.executable, "-m", "leaktight", *words, *more]

    def start(self, run: str, *more: str, limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        """A running audit in a process group of its own. limit: called in its process before it starts."""
        (self.folder / "audit.toml").write_text(SMALL)
        with (self.folder / f"{run}.log").open("w") as log:
            return subprocess.Popen(
                self.command(run, *more),
                cwd=self.folder,
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
                start_new_session=True,
                preexec_fn=limit,
            )

    def wait(self, process: subprocess.Popen[str], run: str) -> Ended:
        code = process.wait(timeout=600)
        return Ended(code, (self.folder / f"{run}.log").read_text())

    def run(self, run: str, *more: str, limit: Callable[[], None] | None = None) -> Ended:
        return self.wait(self.start(run, *more, limit=limit), run)

    def in_own_mounts(self, script: str) -> list[Ended]:
        """Run a shell script with mounts of its own. Each `audit RUN ...` in it is an audit; gives how they ended."""
        (self.folder / "audit.toml").write_text(SMALL)
        words = " ".join(self.command("$1")[:-2])
        audit = f'audit() {{ run=$1; shift; {words} --out $run "$@" 2>&1 >/dev/null; echo "=== $?"; }}\n'
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", audit + script],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        *parts, rest = done.stdout.split("=== ")
        codes = [int(part.splitlines()[0]) for part in [*parts, rest][1:]]
        errors = [parts[0], *(part.split("\n", 1)[1] for part in parts[1:])]
        return [Ended(code, text) for code, text in zip(codes, errors, strict=True)]

    def printed(self, run: str) -> str:
        log = self.folder / f"{run}.log"
        return log.read_text() if log.exists() else ""

    def wait_for(self, run: str, words: str, process: subprocess.Popen[str]) -> bool:
        """Wait until a running audit has printed these words; whether it has."""
        while process.poll() is None:
            if words in self.printed(run):
                return True
            time.sleep(0.002)
        return False

    def results(self, run: str) -> dict[str, Any]:
        """What is the same in every run: trials and summary without times, and the bytes of pictures and models."""
        folder = self.folder / run
        trials = {}
        for line in (folder / "trials.jsonl").read_text().splitlines():
            trial = json.loads(line)
            trials[trial["id"]] = {key: each for key, each in trial.items() if not key.endswith(("seconds", "sha256"))}
        summary = json.loads((folder / "summary.json").read_text())
        for cell in summary["cells"]:
            del cell["seconds"]
        files = [*folder.glob("images/*.png"), *folder.glob("training/*/model.safetensors")]
        return {
            "trials": trials,
            "summary": {key: each for key, each in summary.items() if key not in _OF_THE_CALL},
            "files": {str(file.relative_to(folder)): file.read_bytes() for file in files},
            "left over": [file.name for file in folder.rglob(".partial-*")],
        }

    def failed(self, run: str) -> int:
        """The number of trials that are stored as failed."""
        file = self.folder / run / "trials.jsonl"
        return file.read_bytes().count(b'"status": "failed"') if file.exists() else 0
