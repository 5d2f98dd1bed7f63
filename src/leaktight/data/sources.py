"""Fetching and checking published data sets and weights, and where they lie below the data root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from leaktight.core.errors import DataError, UsageError, suggestion
from leaktight.data.archives import differences, extract
from leaktight.data.download import RemoteFile, checksum_of, fetch
from leaktight.data.published import SOURCES, Source

ARCHIVES = "archives"
"""The folder below the data root that keeps downloaded archives; it may be deleted once they are unpacked."""

State = Literal["ready", "unchecked", "damaged", "missing"]

FileProgress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes done, and the bytes in all where the server tells."""

_SHOWN = 5
_MISSING, _DIFFERS = "is missing", "differs"


@dataclass(frozen=True)
class Report:
    """What lies in a source's folder.

    state: "ready", all there and as published; "unchecked", there, with nothing to compare it with; "damaged", files
    are missing or differ, and `problems` says which; "missing". message: one line for the user.
    """

    name: str
    folder: Path
    state: State
    message: str
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        return self.state in ("ready", "unchecked")


def prepare(
    name: str,
    root: Path,
    *,
    force: bool = False,
    progress: FileProgress | None = None,
    client: httpx.Client | None = None,
) -> Report:
    """Fetch and unpack what is not there yet; `force` replaces what is there but is not as published.

    A set that has to be fetched by hand gives a report that says what to put where, in state "missing".
    """
    source = _source(name)
    if source.manual:
        return verify(name, root)
    folder = root / source.folder

    def get(file: RemoteFile, into: Path) -> Path:
        told = None if progress is None else lambda done, total: progress(file.name, done, total)
        return fetch(file, into, progress=told, client=client, force=force)

    for file in source.files:
        get(file, folder)
    if source.archive and (force or not _has_files(folder)):
        extract(get(source.archive, root / ARCHIVES), folder, subtree=source.subtree, force=folder.exists())
        return Report(name, folder, "ready", f"{name}: fetched to {folder} and verified")
    report = verify(name, root)
    if not report.usable:
        raise DataError(report.message)
    return report


def present(name: str, root: Path) -> bool:
    """Whether anything lies in the source's folder; `verify` says whether it is what was published."""
    return _has_files(root / _source(name).folder)


def verify(name: str, root: Path) -> Report:
    """Compare what lies below `root` with what was published."""
    source = _source(name)
    folder = root / source.folder
    if not _has_files(folder):
        what = source.manual or f"fetch it with `leaktight data {name}`"
        return Report(name, folder, "missing", f"{name}: not at {folder}; {what.format(folder=folder)}")
    problems, checked = _problems(source, folder, root / ARCHIVES)
    if problems:
        shown = ", ".join(f"{file} {what}" for file, what in list(problems.items())[:_SHOWN])
        rest = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        replace = source.archive or _DIFFERS in problems.values()
        remedy = (
            f"replace it with `leaktight data {name} --force`" if replace else f"fetch with `leaktight data {name}`"
        )
        message = f"{name}: {folder} is not as published: {shown}{rest}; {remedy}"
        return Report(name, folder, "damaged", message, problems)
    if not checked:
        return Report(name, folder, "unchecked", f"{name}: found at {folder}; there is nothing to check it against")
    return Report(name, folder, "ready", f"{name}: {folder} is complete and as published")


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise UsageError(f"expected a known data set, got {name!r}; {suggestion(name, SOURCES)}")
    return SOURCES[name]


def _problems(source: Source, folder: Path, archives: Path) -> tuple[dict[str, str], bool]:
    """The files that are missing or differ, and whether there was anything to compare with."""
    published = {file.name: file.checksum for file in source.files} | dict(source.contents)
    if published:
        states = {file: _state(folder / file, checksum) for file, checksum in published.items()}
        return {file: state for file, state in states.items() if state}, True
    packed = archives / source.archive.name if source.archive else None
    if source.archive is None or packed is None or not packed.exists():
        return {}, False
    if not source.archive.matches(packed):
        return {f"{ARCHIVES}/{packed.name}": _DIFFERS}, True
    return dict.fromkeys(differences(packed, folder, subtree=source.subtree), "is missing or differs"), True


def _state(path: Path, checksum: str) -> str:
    if not path.is_file():
        return _MISSING
    return "" if checksum_of(path, like=checksum) == checksum else _DIFFERS


def _has_files(folder: Path) -> bool:
    """Whether anything but the remains of a download is there."""
    return folder.is_dir() and any(
        entry.suffix not in (".part", ".lock") and not entry.name.startswith(".") for entry in folder.iterdir()
    )
