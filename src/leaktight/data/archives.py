"""Unpacking archives of others: regular files with plain names, of bounded size, written one by one.

Nothing is left to the extraction of `tarfile`, whose filter lets links lead out of the folder on Pythons before
3.11.13, 3.12.11 and 3.13.4 (CVE-2025-4517, 4330, 4138, 4435 and CVE-2024-12718): links are refused.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from leaktight.core.errors import DataError
from leaktight.core.reading import most_unpacked, open_zip, opened, size_words
from leaktight.core.text import is_plain_name, printable

MOST_ARCHIVE = 2**40
_MOST_LISTING = 256 * 2**20
_MOST_PARTS = 32
_MOST_READ = 2**14
"""The most bytes that `tarfile` may ask for at once: it asks for a whole header, whose size is what the file says."""
_CHUNK = 2**20
_BLOCK = 4096
"""What a file takes on a disk at least."""
_PACKED: Mapping[bytes, Callable[[IO[bytes]], object]] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
_ERRORS = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError),
    *(ValueError, NotImplementedError, RuntimeError, OverflowError, UnicodeError),
)


def unpack(archive: Path, folder: Path) -> None:
    """Write the files of a .tar, packed or not, or a .zip into an empty folder.

    Raises DataError for links, devices, names that lead out, and more bytes than an archive of its size may hold.
    """
    most = left = most_unpacked(archive.stat().st_size)
    for member in members(archive):
        left -= max(member.size, _BLOCK)
        if left < 0:
            raise _distrusted(archive, f"more than {size_words(most)} in a file of its size")
        target = folder / member.path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = target.open("xb")
        except (FileExistsError, NotADirectoryError):
            raise _distrusted(archive, f"the name {str(member.path)!r} twice") from None
        with file:
            file.writelines(member.content)


@dataclass(frozen=True)
class Member:
    """A file of an archive. content: its bytes, a piece at a time, `size` of them."""

    path: PurePosixPath
    size: int
    content: Iterator[bytes]


def members(archive: Path) -> Iterator[Member]:
    """Every file of the archive with its content; read it before asking for the next one."""
    with opened(archive, MOST_ARCHIVE, DataError) as file, _named_errors(archive):
        if zipfile.is_zipfile(file):
            yield from _in_zip(archive, file)
        else:
            file.seek(0)
            yield from _in_tar(archive, file)


def _in_zip(archive: Path, file: IO[bytes]) -> Iterator[Member]:
    with open_zip(file, archive, _MOST_LISTING, DataError) as packed:
        for info in packed.infolist():
            path = _plain(archive, info.filename)
            mode = stat.S_IFMT(info.external_attr >> 16)
            if mode not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _distrusted(archive, f"a link or device {info.filename!r}")
            if not info.is_dir():
                with packed.open(info) as stream:
                    yield Member(path, info.file_size, _chunks(archive, stream))


def _in_tar(archive: Path, file: IO[bytes]) -> Iterator[Member]:
    start = file.read(2)
    file.seek(0)
    opener = _PACKED.get(start)
    plain = cast("IO[bytes]", opener(file)) if opener else file
    most = most_unpacked(os.fstat(file.fileno()).st_size)
    with tarfile.open(fileobj=_Forward(plain, most), mode="r:") as packed:
        for member in packed:
            path = _plain(archive, member.name)
            if member.isdir():
                continue
            if not member.isreg() or member.issparse() or member.size < 0:
                raise _distrusted(archive, f"a link, device or sparse file {member.name!r}")
            content = packed.extractfile(member)
            if content is not None:
                with content:
                    yield Member(path, member.size, _chunks(archive, content))
            packed.members = []  # type: ignore[attr-defined]  # tarfile keeps all, which may be millions


class _Forward(io.RawIOBase):
    """A stream for `tarfile` that goes forward only and gives little at once.

    A size below 0 would make `tarfile` read the same header for ever (CVE-2025-8194), and a header may announce
    gigabytes, or a megabyte that takes its patterns hours (CVE-2024-6232). Headers alone may unpack to terabytes, so
    there is an end after `most` bytes.
    """

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self.stream, self.most, self.place = stream, most, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= _MOST_READ:
            raise tarfile.ReadError(f"expected headers of at most {_MOST_READ} bytes, got {size}")
        content = self.stream.read(size)
        self.place += len(content)
        if self.place > self.most:
            raise tarfile.ReadError(f"expected at most {size_words(self.most)} in a file of its size, got more")
        return content

    def seek(self, place: int, whence: int = os.SEEK_SET, /) -> int:
        if whence != os.SEEK_SET or place < self.place:
            raise tarfile.ReadError("expected members one after another, got one that leads back")
        while self.place < place and self.read(min(place - self.place, _MOST_READ)):
            pass
        return self.place


def _chunks(archive: Path, stream: IO[bytes]) -> Iterator[bytes]:
    size = _MOST_READ // 2 if isinstance(stream, tarfile.ExFileObject) else _CHUNK
    with _named_errors(archive):
        while chunk := stream.read(size):
            yield chunk


def _plain(archive: Path, name: str) -> PurePosixPath:
    """The name as a path below a folder, on any system."""
    path = PurePosixPath(name)
    out = not name or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name
    if out or not is_plain_name(name) or len(path.parts) > _MOST_PARTS or len(name) > 1000:
        raise _distrusted(archive, repr(printable(name, 100)))
    return path


def _distrusted(archive: Path, what: str) -> DataError:
    return DataError(f"{archive}: expected files inside the archive's own folder, got {what}; do not trust this file")


@contextmanager
def _named_errors(archive: Path) -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        why = printable(error) or type(error).__name__
        raise DataError(
            f"{archive}: expected a tar or zip archive, got a damaged file ({why}); fetch it again"
        ) from error
