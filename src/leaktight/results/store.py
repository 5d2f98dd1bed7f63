"""Writing trials to `trials.jsonl`, and reading all result files of a run.

A line is appended at once and synced to disk. A killed process leaves at most one incomplete last line, which the next
one removes. The pictures of a trial are written before its line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leaktight.core.errors import MachineError, ResultsError
from leaktight.core.faults import remedy
from leaktight.core.files import write_atomically
from leaktight.core.reading import MOST_RESULTS, read_limited
from leaktight.results.lines import line_of, read_lines, whole_lines
from leaktight.results.schema import Environment, Summary, Trial, parse


@dataclass
class TrialStore:
    """The finished trials of a run, by id. Open it with `open_store`, in one process only."""

    path: Path
    trials: dict[str, Trial] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.path / "trials.jsonl"

    def add(self, trial: Trial, pictures: Mapping[str, bytes]) -> None:
        """Store a finished trial; it is on disk when this returns. pictures: PNGs by path in the folder."""
        for name, data in pictures.items():
            write_atomically(self.path / name, data)
        self._append(line_of(trial))
        self.trials[trial.id] = trial

    def forget_failed(self) -> None:
        """Remove failed trials from the store and its file, so that they are repeated."""
        lines = read_lines(self.file, read_file(self.file) or b"")
        kept = [line for line in lines if line.trial.status != "failed"]
        write_atomically(self.file, b"".join(line.text + b"\n" for line in kept))
        self.trials = read_trials(self.path)

    def replace_all(self, trials: Sequence[Trial]) -> None:
        """Put these trials in the place of all others, at once."""
        write_atomically(self.file, b"".join(line_of(trial) for trial in trials))
        self.trials = read_trials(self.path)

    @property
    def failed(self) -> tuple[str, ...]:
        """The ids of trials that ended in an error."""
        return tuple(name for name, trial in self.trials.items() if trial.status == "failed")

    def _append(self, data: bytes) -> None:
        try:
            descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                _write_whole(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _cannot_write(self.file, error) from error


def open_store(path: Path) -> TrialStore:
    """The store of a run's folder, with its trials. An incomplete last line is removed from the file."""
    store = TrialStore(path, read_trials(path))
    content = read_file(store.file) or b""
    whole = whole_lines(content)
    if whole != len(content):
        try:
            with store.file.open("r+b") as opened:
                opened.truncate(whole)
                os.fsync(opened.fileno())
        except OSError as error:
            raise _cannot_write(store.file, error) from error
    return store


def read_trials(folder: Path) -> dict[str, Trial]:
    """The trials of a run by id, without an incomplete last line. Of repeated ids the first counts."""
    file = folder / "trials.jsonl"
    trials: dict[str, Trial] = {}
    for line in read_lines(file, read_file(file) or b""):
        trials.setdefault(line.trial.id, line.trial)
    return trials


def read_summary(folder: Path) -> Summary | None:
    """The summary of an audit, a trade-off or an inspection; None if the run is not finished."""
    file = folder / "summary.json"
    content = read_file(file)
    if content is None:
        return None
    if b'"cells"' not in content and b'"rounds"' in content:
        raise ResultsError(f"{folder} holds a training run, which has no leakage to report; see its curve.png")
    return parse(Summary, content, str(file))


def read_environment(folder: Path) -> Environment:
    """The environment of a run; empty if its file is missing."""
    file = folder / "environment.json"
    return parse(Environment, read_file(file) or b"{}", str(file))


def read_text(path: Path) -> str:
    """The content of a text file; empty if it is missing."""
    try:
        return (read_file(path) or b"").decode()
    except UnicodeDecodeError as error:
        raise ResultsError(f"{path} is not text in UTF-8; the file is damaged: restore it") from error


def read_file(path: Path) -> bytes | None:
    """The bytes of a file; None if it is missing."""
    return read_limited(path, MOST_RESULTS, ResultsError) if os.path.lexists(path) else None


def _write_whole(descriptor: int, data: bytes) -> None:
    """Append these bytes, or none of them."""
    size, done = os.fstat(descriptor).st_size, 0
    try:
        while done < len(data):
            done += os.write(descriptor, data[done:])
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _cannot_write(file: Path, error: OSError) -> MachineError:
    reason = error.strerror or str(error)
    return MachineError(f"cannot write {file}: {reason}; {remedy(error)}; --resume goes on")
