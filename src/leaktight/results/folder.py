"""The folder of one run: resolved config, environment, results. Only one process at a time writes to it."""

from __future__ import annotations

import json
import platform
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import filelock

from leaktight.core.errors import CheckpointError, MachineError, ResultsError, UsageError
from leaktight.core.faults import remedy
from leaktight.core.files import make_private_folder, remove_partial, without_secrets, write_atomically, write_private
from leaktight.core.keys import KEY_BYTES, parse_key
from leaktight.results.differences import changes, read_record, refusal
from leaktight.results.digest import MANIFEST, sealed
from leaktight.results.history import HISTORY, Stage, read_history
from leaktight.results.schema import Environment, Summary, TrainingSummary
from leaktight.results.store import read_file, read_summary, read_text

_RECORDED_PACKAGES = ("leaktight", "torch", "numpy", "scipy", "scikit-learn", "scikit-image", "torchmetrics")

_WRITTEN_FIRST = ("secret.key", "environment.json", "config.toml")
"""Files of a run's start; while the last of them is missing, the folder may hold files of others."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    def checkpoint(self, rounds: int) -> Path:
        """The server's state and history after this number of rounds."""
        return self.path / f"checkpoint-{rounds:05d}.state"

    def private(self, rounds: int) -> Path:
        """The clients' private states and reports after this number of rounds."""
        return self.path / f"clients-{rounds:05d}.state"

    @property
    def checkpoints(self) -> list[int]:
        """The numbers of rounds after which there is a checkpoint, in order."""
        return _numbers(self.path.glob("checkpoint-*.state"))

    @property
    def all_private(self) -> list[int]:
        """The numbers of rounds after which there is a file of the clients' states, in order."""
        return _numbers(self.path.glob("clients-*.state"))

    @property
    def older_checkpoint(self) -> Path:
        """The checkpoint of versions that kept one, without a checksum."""
        return self.path / "checkpoint.safetensors"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def command(self) -> Path:
        """The call that started the run."""
        return self.path / "command.txt"

    @property
    def secret(self) -> Path:
        return self.path / "secret.key"

    @property
    def key(self) -> bytes:
        """The key from which clients draw noise, masks, keys and the order of batches."""
        try:
            return parse_key(self.secret.read_text().strip())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} has no readable secret.key, which its clients need; restore the file, or choose another "
                "--out and start again"
            ) from error

    @property
    def started(self) -> bool:
        return self.config.exists()

    def write_summary(self, summary: Summary) -> Summary:
        """Write the summary of an audit or an inspection with the run's digest, and return it as written.

        A finished run that says the same already keeps its summary, so that its digest stays when it is resumed.
        """
        before = self._written()
        if before is not None and _said(before) == _said(summary) and sealed(self.path, before)[0] == before:
            return before
        summary, manifest = sealed(self.path, summary)
        write_atomically(self.path / MANIFEST, json.dumps(manifest.document(), indent=1))
        write_atomically(self.summary, json.dumps(summary.document(), indent=1))
        return summary

    def withdraw_summary(self) -> None:
        """Remove the summary and what was made from it, as a run that goes on is not finished."""
        for name in ("junit.xml", "sarif.json", "report.html", self.summary.name, MANIFEST):
            (self.path / name).unlink(missing_ok=True)

    def outgrow_summary(self) -> None:
        """Withdraw the summary, if there is one, as more trials follow; the history counts it as a look."""
        if self.summary.exists():
            self._remember()
            self.withdraw_summary()

    def grow(self, config_text: str, call: str = "") -> None:
        """Let the run go on with these settings; `history.json` keeps those it had. call: what asked for it.

        The new settings are written last: an interrupted growth is asked for again, and leaves the run as it was.
        """
        self._remember()
        self.withdraw_summary()
        if call and self.calls[-1:] != (call,):
            write_atomically(self.command, "".join(f"{each}\n" for each in (*self.calls, call)))
        write_atomically(self.config, config_text)

    @property
    def calls(self) -> tuple[str, ...]:
        """The call that started the run, and those that let it grow."""
        return tuple(read_text(self.command).splitlines())

    def looks(self, trials: int) -> int:
        """How often a summary of fewer trials than these was written."""
        return read_history(self.path).looks(trials)

    def _remember(self) -> None:
        """Write what the run is now to its history."""
        before = self._written()
        lines = (read_file(self.path / "trials.jsonl") or b"").count(b"\n")
        stage = Stage(
            config=read_text(self.config),
            command="\n".join(self.calls),
            trials=lines if before is None else sum(cell.trials for cell in before.cells),
            digest=None if before is None else before.digest,
        )
        history = read_history(self.path).with_stage(stage)
        write_atomically(self.path / HISTORY, json.dumps(history.document(), indent=1))

    def _written(self) -> Summary | None:
        """The summary in the folder; None if there is none that can be read."""
        try:
            return read_summary(self.path)
        except ResultsError:
            return None

    def write_training(self, summary: TrainingSummary) -> None:
        write_atomically(self.summary, json.dumps(summary.document(), indent=1))


Grow = Callable[[RunFolder, str], None]
"""Lets the run in a folder go on with the settings of a new `config.toml`, or raises UsageError."""


def refuse(folder: RunFolder, config_text: str) -> None:
    """Name the settings in which a run differs from `config_text`."""
    held = read_record(read_text(folder.config), folder.config)
    raise refusal(folder.path, list(changes(held, read_record(config_text, "the new settings"))))


@contextmanager
def open_run(
    path: Path,
    config_text: str,
    *,
    resume: bool,
    clients: bool = True,
    key: bytes | None = None,
    grow: Grow = refuse,
) -> Iterator[RunFolder]:
    """Create a run's folder, or open an existing one if `resume`. Raises UsageError if another process writes to it.

    clients: whether the run has clients, which need a secret key. key: the key of an experiment to replay; None for a
    new one. grow: called if the run there has other settings.
    """
    folder = RunFolder(path)
    try:
        make_private_folder(path)
        lock = filelock.FileLock(path / ".lock")
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise UsageError(f"another process is writing to {path}; wait for it, or choose another --out") from error
    except OSError as error:
        raise MachineError(f"cannot write to {path}: {error.strerror}; {remedy(error)}") from error
    try:
        remove_partial(path, None if folder.started else _WRITTEN_FIRST)
        if folder.started and not resume:
            raise UsageError(f"{path} already holds a run; add --resume to continue it, or choose another --out")
        if folder.started and key is not None and key != folder.key:
            raise UsageError(f"{path} holds a run with another secret_seed; leave it out, or choose another --out")
        if folder.started and read_text(folder.config) != config_text:
            grow(folder, config_text)
        if not folder.started:
            if clients:
                write_private(folder.secret, (key or secrets.token_bytes(KEY_BYTES)).hex() + "\n")
            write_atomically(folder.environment, json.dumps(environment().document(), indent=1))
            write_atomically(folder.config, config_text)
        yield folder
    finally:
        lock.release()


def next_folder(parent: Path, name: str) -> Path:
    """The first free folder `name-001`, `name-002`, ... in `parent`."""
    number = 1
    while (parent / f"{name}-{number:03d}").exists():
        number += 1
    return parent / f"{name}-{number:03d}"


def latest_folder(parent: Path, name: str, config_text: str) -> Path:
    """The newest folder `name-NNN` whose run has exactly these settings."""
    for path in started_folders(parent, name):
        if read_text(RunFolder(path).config) == config_text:
            return path
    raise UsageError(f"no run of {name} with these settings below {parent}; run it without --resume, or name its --out")


def started_folders(parent: Path, name: str) -> list[Path]:
    """The folders `name-NNN` in `parent` that hold a run, the newest first."""
    paths = [path for path in parent.glob(f"{name}-*") if path.name.rpartition("-")[2].isdigit()]
    newest = sorted(paths, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    return [path for path in newest if RunFolder(path).started]


def environment() -> Environment:
    """The versions, platform and command of this process."""
    packages = {}
    for package in _RECORDED_PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    return Environment(
        python=sys.version.split()[0],
        platform=platform.platform(),
        processor=platform.machine(),
        packages=packages,
        command=tuple(without_secrets(sys.argv)),
    )


def _numbers(paths: Iterable[Path]) -> list[int]:
    """The numbers at the end of the names of files, in order."""
    return sorted(int(end) for path in paths if (end := path.stem.rpartition("-")[2]).isdigit())


def _said(summary: Summary) -> dict[str, object]:
    """What a summary says of the trials: all but the effort of the call that wrote it, and the digest."""
    return {key: value for key, value in summary.document().items() if key not in ("spending", "digest")} | {
        "trials": summary.spending and summary.spending.trials
    }
