"""Unpacking archives safely: nothing outside the folder, nothing half-done."""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from leaktight.core.errors import DataError
from leaktight.data.download import named_os_errors

_CHUNK = 1 << 20


def extract(archive: Path, folder: Path, *, subtree: str = "", force: bool = False) -> Path:
    """Unpack a .tar, .tar.gz or .zip so that `folder` is its content, or the part of its content below `subtree`.

    The folder appears when everything is unpacked, not before. It must not exist, unless `force` replaces it.
    """
    if folder.exists() and not force:
        raise DataError(f"{folder}: expected no such folder to unpack into, got one; replace it with --force")
    with named_os_errors(folder.parent, "write to"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with named_os_errors(folder, "unpack into"):
            unpacked = scratch / "new"
            unpacked.mkdir()
            _unpack(archive, unpacked)
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
        str(path.relative_to(below))
        for path, stream in _files(archive)
        if path.is_relative_to(below) and not _same(stream, folder / path.relative_to(below))
    ]


def _unpack(archive: Path, folder: Path) -> None:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                for info in packed.infolist():
                    _check_zip_entry(archive, info)
                packed.extractall(folder)
        else:
            with tarfile.open(archive) as packed_tar:
                packed_tar.extractall(folder, filter="data")
    except tarfile.FilterError as error:
        raise DataError(f"{archive}: expected files inside the archive's own folder, got {error}") from error
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive}: expected a tar or zip archive, got a damaged file ({error})") from error


def _check_zip_entry(archive: Path, info: zipfile.ZipInfo) -> None:
    path = PurePosixPath(info.filename.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in info.filename or stat.S_ISLNK(info.external_attr >> 16):
        raise DataError(
            f"{archive}: expected files inside the archive's own folder, got {info.filename!r}; do not trust this file"
        )


def _files(archive: Path) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    """Every regular file of the archive with its content; read it before asking for the next one."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                if not info.is_dir():
                    with packed.open(info) as stream:
                        yield PurePosixPath(info.filename), stream
        return
    with tarfile.open(archive) as packed_tar:
        for member in packed_tar:
            content = packed_tar.extractfile(member) if member.isfile() else None
            if content is not None:
                with content:
                    yield PurePosixPath(member.name), content


def _same(stream: IO[bytes], path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as other:
        while True:
            expected = stream.read(_CHUNK)
            if expected != other.read(_CHUNK):
                return False
            if not expected:
                return True
