"""Find a data set below the data root, and read a folder and a zip in the same way."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from leaktight.core.errors import DataError
from leaktight.core.reading import open_zip, opened, read_limited
from leaktight.core.scope import outside_file
from leaktight.core.text import is_plain_name, printable

MAX_MEMBER_BYTES = 512 * 2**20
_MAX_ZIP_RATIO = 200  # deflate reaches 1032 on zeros; photographs stay near 1
_RATIO_MATTERS_FROM = 2**20
_MAX_ZIP_BYTES = 2**40
_MAX_LISTING = 64 * 2**20  # of the table of contents: about 500 000 files
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError)


@dataclass(frozen=True)
class Tree:
    """The files of a folder or of a zip. names: sorted relative paths, with forward slashes."""

    source: Path
    read: Callable[[str], bytes]
    has: Callable[[str], bool]
    listed: Callable[[], Iterable[str]]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.listed() if not _is_junk(name)))

    def where(self, name: str) -> str:
        """The full path of a file, for messages."""
        return f"{self.source}/{name}"

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(name)}: expected text in UTF-8, got {error.reason}; convert it") from None


class MissingDataError(DataError):
    """A data set, or a part of it, was not found."""


def missing(name: str, looked_in: Sequence[Path], expected: str) -> MissingDataError:
    """The error for a data set that was not found."""
    places = " or ".join(str(place) for place in looked_in)
    return MissingDataError(
        f"{name}: expected {expected} in {places}, found nothing; fetch it with `leaktight data {name}` or put it there"
    )


def incomplete(name: str, folder: Path, absent: Sequence[str], total: int) -> MissingDataError:
    """The error for a data set of which files are missing."""
    number = f"all {total}" if len(absent) == total else f"{len(absent)} of {total}"
    return MissingDataError(
        f"{name}: {number} files are missing: {', '.join(absent)} in {folder}; "
        f"fetch them with `leaktight data {name} --force` or put them there"
    )


def first_existing(paths: Sequence[Path]) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def find_source(root: Path, name: str, folders: Sequence[str], expected: str) -> Path:
    """The folder or the zip that holds a data set. A folder that holds only a zip means that zip."""
    for folder in folders:
        if (root / folder).is_dir():
            return _zip_alone(root / folder)
        if (root / f"{folder}.zip").is_file():
            return root / f"{folder}.zip"
    raise missing(name, [root / folder for folder in folders], expected)


def _zip_alone(folder: Path) -> Path:
    zips = sorted(folder.glob("*.zip"))
    if not zips or any(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir()):
        return folder
    if len(zips) > 1:
        raise DataError(f"{folder}: expected one zip, got {', '.join(path.name for path in zips)}; keep one of them")
    return zips[0]


@contextmanager
def open_tree(source: Path) -> Iterator[Tree]:
    """Open a folder, or a zip after looking at its table of contents."""
    if source.is_dir():
        yield Tree(
            source,
            read=lambda name: read_limited(source / name, MAX_MEMBER_BYTES, DataError),
            has=lambda name: (source / name).is_file(),
            listed=lambda: _folder_names(source),
        )
        return
    with opened(source, _MAX_ZIP_BYTES, DataError) as file:
        try:
            archive = open_zip(file, source, _MAX_LISTING, DataError)
        except _ZIP_ERRORS as error:
            if (outside := outside_file(source.name)) is not None:
                raise DataError(f"{source}: {outside}") from None
            raise DataError(f"{source}: expected a folder or a zip, got neither ({error}); fetch it again") from None
        with archive:
            names = frozenset(_checked(source, info) for info in archive.infolist() if info.filename[-1:] != "/")
            yield Tree(
                source, read=lambda name: _member(archive, source, name), has=names.__contains__, listed=lambda: names
            )


def _member(archive: zipfile.ZipFile, source: Path, name: str) -> bytes:
    try:
        return archive.read(name)
    except (KeyError, *_ZIP_ERRORS) as error:
        raise DataError(f"{source}/{name}: expected an undamaged member, got {error}; fetch the zip again") from None


def _folder_names(folder: Path) -> Iterator[str]:
    for place, _, files in os.walk(folder):
        relative = Path(place).relative_to(folder)
        yield from ((relative / file).as_posix() for file in files)


def _checked(source: Path, info: zipfile.ZipInfo) -> str:
    path = PurePosixPath(info.filename)
    if (
        not is_plain_name(info.filename)
        or path.is_absolute()
        or not path.parts
        or ".." in path.parts
        or "\\" in info.filename
        or ":" in path.parts[0]
    ):
        raise DataError(f"{source}: expected names inside the zip, got {info.filename!r}; do not trust this file")
    ratio = info.file_size / max(info.compress_size, 1)
    if info.file_size > MAX_MEMBER_BYTES or (info.file_size > _RATIO_MATTERS_FROM and ratio > _MAX_ZIP_RATIO):
        raise DataError(
            f"{source}/{info.filename}: expected at most {MAX_MEMBER_BYTES} bytes, packed {_MAX_ZIP_RATIO} to 1, "
            f"got {info.file_size} bytes, {ratio:.0f} to 1; do not trust this file"
        )
    return info.filename


def _is_junk(name: str) -> bool:
    """Whether a file is hidden, or metadata of a file manager."""
    return any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)


def user_path(path: str, root: Path) -> Path:
    """An existing path from the settings: absolute, relative to the current folder, or relative to the data root."""
    given = Path(path).expanduser()
    try:
        found = first_existing([given, root / given])
    except OSError as error:
        raise DataError(f"cannot look for {printable(given)}: {error.strerror}; set path") from None
    if found is None:
        raise DataError(f"expected a file or folder at {given} or {root / given}, found nothing; set path")
    return found
