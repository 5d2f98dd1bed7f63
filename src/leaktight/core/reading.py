"""Reading files of others: regular files alone, of bounded size, before anything is allocated."""

from __future__ import annotations

import os
import re
import stat
import struct
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from leaktight.core.errors import UsageError
from leaktight.core.text import printable

MOST_TEXT = 2**20
"""The most bytes of a config."""
MOST_RESULTS = 2**30
"""The most bytes of a result file."""
MOST_UNPACKED = 2**30
"""What any packed file may take in memory; a larger one has to be of at least 1/50 of that size itself."""
MOST_RATIO = 50
MOST_PARTS = 32
"""The most parts of a dotted key."""
_MOST_DEPTH = 64
_DOTTED = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_PARTS}}}""")
_OPEN_ALREADY = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/(\d{1,6})")
_from_pipes: dict[int, bytes] = {}
_ZIP_END, _ZIP64_PLACE, _ZIP64_END = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"
_ZIP_TAIL = 2**16 + 22 + 20


class NotTomlError(UsageError):
    """A text that is not TOML."""


@contextmanager
def opened(path: Path, most: int, error: type[UsageError] = UsageError) -> Iterator[BufferedReader]:
    """Open a regular file of at most `most` bytes. A pipe, a device or a larger file raises `error`, at once."""
    try:
        # Opening a pipe without O_NONBLOCK waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as fault:
        raise error(f"cannot read {path}: expected a readable file, got {_reason(fault)}; check the path") from fault
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"
        raise error(f"cannot read {path}: expected a regular file, got {what}; save the content as a file")
    with os.fdopen(descriptor, "rb") as file:
        if found.st_size > most:
            raise error(f"{path}: expected at most {size_words(most)}, got {size_words(found.st_size)}; check the file")
        yield file


def read_limited(path: Path, most: int, error: type[UsageError] = UsageError) -> bytes:
    """The content of a regular file of at most `most` bytes; `error` is raised for any other."""
    with opened(path, most, error) as file:
        try:
            content = file.read(most + 1) or b""  # None: a file of the system that says nothing now
        except OSError as fault:
            raise error(f"cannot read {path}: {_reason(fault)}; check the file") from fault
    if len(content) > most:
        raise error(f"{path}: expected at most {size_words(most)}, got more; check the file")
    return content


def _reason(fault: Exception) -> str:
    return (fault.strerror if isinstance(fault, OSError) else None) or str(fault)


def size_words(count: int) -> str:
    """A number of bytes in words.

    >>> size_words(5_700_000_000), size_words(2**20), size_words(12)
    ('5.7 GB', '1.05 MB', '12 bytes')
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"


def most_unpacked(packed: int) -> int:
    """The most bytes that a file of `packed` bytes may unpack to."""
    return max(MOST_UNPACKED, MOST_RATIO * packed)


def open_zip(file: IO[bytes], source: object, most_listing: int, error: type[UsageError]) -> zipfile.ZipFile:
    """A zip whose table of contents has at most `most_listing` bytes, which is looked up before it is read."""
    listing = _listing_bytes(file)
    if listing > most_listing:
        raise error(
            f"{source}: expected a table of contents of at most {size_words(most_listing)}, got {size_words(listing)}; "
            "split the zip or unpack it"
        )
    file.seek(0)
    return zipfile.ZipFile(file)


def _listing_bytes(file: IO[bytes]) -> int:
    """The size of a zip's table of contents, from the end of the file; 0 if there is none."""
    length = file.seek(0, os.SEEK_END)
    file.seek(max(length - _ZIP_TAIL, 0))
    tail = file.read(_ZIP_TAIL)
    place = tail.rfind(_ZIP_END)
    if place < 0 or len(tail) - place < 22:
        return 0
    sizes = [struct.unpack_from("<I", tail, place + 12)[0]]
    before = tail[max(place - 20, 0) : place]
    if before.startswith(_ZIP64_PLACE):
        file.seek(min(struct.unpack_from("<Q", before, 8)[0], length))
        end = file.read(56)
        if end.startswith(_ZIP64_END) and len(end) == 56:
            sizes.append(struct.unpack_from("<Q", end, 40)[0])
    return int(max(size for size in sizes if size != 0xFFFFFFFF) if sizes != [0xFFFFFFFF] else length)


def parse_toml(text: str, source: object, error: type[UsageError]) -> dict[str, Any]:
    """The tables of a TOML text. Nesting, keys and integers are bounded, so that it takes neither long nor a crash."""
    if len(text) > MOST_TEXT:
        raise error(f"{source}: expected at most {MOST_TEXT} characters of TOML, got {len(text)}; shorten it")
    if _DOTTED.search(text):
        raise error(f"{source}: expected keys of at most {MOST_PARTS} parts, got a longer one; shorten it")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise error(f"{source} is not TOML for Leaktight: it is nested too deeply; flatten it") from None
    except ValueError as fault:
        raise error(f"{source} is not TOML: {printable(fault)}; correct it there") from None
    _check_values(tables, source, error)
    return tables


def _check_values(tables: Mapping[str, object], source: object, error: type[UsageError]) -> None:
    """Raise `error` for values that are nested too deeply, and for integers that TOML does not have."""
    level: list[object] = [tables]
    for _ in range(_MOST_DEPTH):
        if not level:
            return
        if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in level):
            raise error(f"{source}: expected integers of at most 64 bits, got a longer one; correct it")
        mappings = [value for value in level if isinstance(value, Mapping)]
        lists = [value for value in level if isinstance(value, list)]
        level = [item for value in mappings for item in value.values()] + [item for value in lists for item in value]
    raise error(f"{source}: expected values nested at most {_MOST_DEPTH} deep, got deeper ones; flatten them")


def _piped(path: Path) -> bytes | None:
    """What comes out of a pipe that this process was started with; None for any other file.

    It is kept: a command reads its config twice, and a pipe is empty the second time.
    """
    named = _OPEN_ALREADY.fullmatch(str(path))
    if named is None:
        return None
    number = int(named.group(1) or 0)
    try:
        found = os.fstat(number)
        if not stat.S_ISFIFO(found.st_mode):
            return None
        if found.st_ino not in _from_pipes:
            with os.fdopen(number, "rb", closefd=False) as file:
                _from_pipes[found.st_ino] = file.read(MOST_TEXT + 1) or b""
    except OSError:
        return None
    return _from_pipes[found.st_ino]


def read_toml(path: Path, error: type[UsageError]) -> dict[str, Any]:
    """The tables of a TOML file, or of what a shell pipes into `/dev/stdin` or makes of `<(command)`."""
    piped = _piped(path)
    content = read_limited(path, MOST_TEXT, error) if piped is None else piped
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise error(f"{path} is not TOML: expected text in UTF-8, got {fault.reason}; save it as UTF-8") from None
    # A bare carriage return ends no line of TOML, but some editors show it as one.
    if re.search(r"\r(?!\n)", text):
        raise error(f"{path} is not TOML: expected lines that end with LF or CR LF, got a bare CR; save it again")
    return parse_toml(text.replace("\r\n", "\n"), path, error)
