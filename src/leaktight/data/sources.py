"""Download, unpack and verify published data sets and weights below the data root."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

import httpx

from leaktight.core.errors import DataError, UsageError, suggestion
from leaktight.data.archives import members, unpack
from leaktight.data.download import RemoteFile, checksum_of, fetch, named_os_errors
from leaktight.data.published import SOURCES, Source

ARCHIVES = "archives"
"""The folder below the data root that keeps downloaded archives; it may be deleted once they are unpacked."""

Status = Literal["ready", "unchecked", "damaged", "missing"]

FileProgress = Callable[[str, int, int | None], None]
"""Called with the name of the file, the bytes received, and the total, or None if the server does not state it."""

_SHOWN = 5
_MISSING, _DIFFERS = "is missing", "differs"


@dataclass(frozen=True)
class SourceReport:
    """The state of a published data set on disk.

    state: "ready", complete and as published; "unchecked", present, but without a checksum to compare with; "damaged",
    files are missing or differ, as `problems` lists by file; "missing". message: one line for the user.
    """

    name: str
    folder: Path
    state: Status
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
) -> SourceReport:
    """Download and unpack what is missing; `force` replaces files that are not as published.

    For a data set that needs a manual download the report has state "missing", and its message the instructions.
    """
    source = _source(name)
    if source.manual:
        return verify(name, root)
    folder = root / source.folder

    def get(file: RemoteFile, into: Path) -> Path:
        of_file = None if progress is None else lambda done, total: progress(file.name, done, total)
        return fetch(file, into, progress=of_file, client=client, force=force)

    for file in source.files:
        get(file, folder)
    if source.archive and (force or not _has_files(folder)):
        extract(get(source.archive, root / ARCHIVES), folder, subtree=source.subtree, force=folder.exists())
        return SourceReport(name, folder, "ready", f"{name}: fetched to {folder} and verified")
    report = verify(name, root)
    if not report.usable:
        raise DataError(report.message)
    return report


def present(name: str, root: Path) -> bool:
    """Whether the folder of a data set holds any files; `verify` compares them with the published ones."""
    return _has_files(root / _source(name).folder)


def verify(name: str, root: Path) -> SourceReport:
    """Compare the files below `root` with the published checksums."""
    source = _source(name)
    folder = root / source.folder
    if not _has_files(folder):
        what = source.manual or f"fetch it with `leaktight data {name}`"
        return SourceReport(name, folder, "missing", f"{name}: not at {folder}; {what.format(folder=folder)}")
    problems, checked = _problems(source, folder, root / ARCHIVES)
    if problems:
        shown = ", ".join(f"{file} {what}" for file, what in list(problems.items())[:_SHOWN])
        rest = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        replace = source.archive or _DIFFERS in problems.values()
        remedy = (
            f"replace it with `leaktight data {name} --force`" if replace else f"fetch with `leaktight data {name}`"
        )
        total = len(source.files) + len(source.contents)
        number = f"{len(problems)} of {total} files: " if total else ""
        message = f"{name}: {folder} is not as published: {number}{shown}{rest}; {remedy}"
        return SourceReport(name, folder, "damaged", message, problems)
    if not checked:
        return SourceReport(name, folder, "unchecked", f"{name}: found at {folder}; it cannot be verified")
    return SourceReport(name, folder, "ready", f"{name}: {folder} is complete and as published")


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise UsageError(f"expected a known data set, got {name!r}; {suggestion(name, SOURCES)}")
    return SOURCES[name]


def _problems(source: Source, folder: Path, archives: Path) -> tuple[dict[str, str], bool]:
    """The files that are missing or differ, and whether there were checksums or an archive to compare with."""
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
    """Whether a folder holds anything but unfinished downloads."""
    return folder.is_dir() and any(
        entry.suffix not in (".part", ".lock") and not entry.name.startswith(".") for entry in folder.iterdir()
    )


def extract(archive: Path, folder: Path, *, subtree: str = "", force: bool = False) -> Path:
    """Unpack a .tar, .tar.gz or .zip, or the part of it below `subtree`, as `folder`.

    The folder appears only when everything is unpacked. If it exists, `force` is needed to replace it.
    """
    if folder.exists() and not force:
        raise DataError(f"{folder}: the folder to unpack into exists; replace it with --force")
    with named_os_errors(folder.parent, "write to"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with named_os_errors(folder, "unpack into"):
            unpacked = scratch / "new"
            unpacked.mkdir()
            unpack(archive, unpacked)
            content = unpacked / subtree
            if not content.is_dir():
                raise DataError(f"{archive}: expected a folder {subtree!r} in it, got none; it is another archive")
            if folder.exists():
                folder.rename(scratch / "old")
            content.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def differences(archive: Path, folder: Path, *, subtree: str = "") -> list[str]:
    """The files of `archive` below `subtree` that `folder` lacks or holds with other content."""
    below = PurePosixPath(subtree)
    return [
        str(each.path.relative_to(below))
        for each in members(archive)
        if each.path.is_relative_to(below) and not _same(each.content, folder / each.path.relative_to(below))
    ]


def _same(content: Iterator[bytes], path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as other:
        return all(chunk == other.read(len(chunk)) for chunk in content) and not other.read(1)
