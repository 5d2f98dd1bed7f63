"""The store of trials: `trials.jsonl`, a line for every finished trial, and their pictures.

A line is appended in one write and forced to the disk. A process that is killed in between leaves at most one torn line
at the end, which the next one drops. The pictures of a trial are written before its line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leaktight.audit.judge import finite
from leaktight.core.errors import CheckpointError, LeaktightError
from leaktight.core.files import write_atomically


@dataclass
class TrialStore:
    """The finished trials of a run, by id. Open it with `open_store`; only one process may."""

    path: Path
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.path / "trials.jsonl"

    def add(self, line: Mapping[str, Any], pictures: Mapping[str, bytes]) -> dict[str, Any]:
        """Keep a finished trial: it is on the disk when this returns."""
        stored: dict[str, Any] = _plain(line)
        if pictures:
            names = {kind: f"images/{line['id']}-{kind}.png" for kind in pictures}
            for kind, data in pictures.items():
                write_atomically(self.path / names[kind], data)
            stored["images"] = {**names, **stored["images"]}
        self._append(json.dumps(stored, allow_nan=False) + "\n")
        self.trials[stored["id"]] = stored
        return stored

    def _append(self, line: str) -> None:
        data = line.encode()
        try:
            descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if os.write(descriptor, data) != len(data):
                    os.ftruncate(descriptor, size)
                    raise OSError("the disk is full")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            reason = error.strerror or str(error)
            raise LeaktightError(
                f"cannot write {self.file}: {reason}; free space, then go on with --resume --out {self.path}"
            ) from error


def open_store(path: Path) -> TrialStore:
    """The store of a run's folder with all trials that are complete; a torn last line is cut off."""
    store = TrialStore(path)
    try:
        content = store.file.read_bytes() if store.file.exists() else b""
    except OSError as error:
        raise LeaktightError(f"cannot read {store.file}: {error.strerror}") from error
    whole = content[: content.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            trial = json.loads(line)
            store.trials[trial["id"]] = trial
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{store.file}, line {number}: not a trial; the file is damaged") from error
    if len(whole) != len(content):
        _cut(store.file, len(whole))
    return store


def _cut(file: Path, size: int) -> None:
    try:
        with file.open("r+b") as opened:
            opened.truncate(size)
            os.fsync(opened.fileno())
    except OSError as error:
        raise LeaktightError(f"cannot write {file}: {error.strerror}; free space or choose another folder") from error


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return finite(value) if isinstance(value, float) else value
