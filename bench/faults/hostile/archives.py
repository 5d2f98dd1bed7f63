"""Hostile archives of published data sets, for the extractor of `leaktight data`."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.faults.hostile.case import Case
from bench.faults.hostile.tensors import ESCAPE, MIB, bomb, zipped

GROUP = "archive"
EXTRACT = """
import sys
from pathlib import Path
from leaktight.core.errors import UsageError
from leaktight.data.sources import extract
try:
    extract(Path(sys.argv[1]), Path(sys.argv[2]))
except UsageError as error:
    print(f"leaktight: {error}", file=sys.stderr)
    sys.exit(2)
"""
"""What `leaktight data` does once the checksum of an archive is that of the publisher."""

Member = tuple[tarfile.TarInfo, bytes]


def extracted(file: str, folder: Path) -> list[str]:
    return ["-c", EXTRACT, str(folder / file), str(folder / "set")]


def member(name: str, content: bytes = b"x", **fields: object) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def _tar(members: Callable[[Path], Sequence[Member]], folder: Path) -> list[str]:
    with tarfile.open(folder / "bad.tar", "w") as archive:
        for info, content in members(folder):
            archive.addfile(info, io.BytesIO(content) if info.isfile() else None)
    return extracted("bad.tar", folder)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    return member(name, b"", type=kind, linkname=target)


def _long_way_out(folder: Path) -> list[Member]:
    """Links whose resolved path is longer than the system can resolve, so that a check of it sees nothing.

    Reference: CVE-2025-4517.
    """
    longest = os.pathconf("/", "PC_PATH_MAX")
    step = "d" * 247
    members, path = [], ""
    for letter in "abcdefghijklmnop":
        members += [member(f"{path}{step}", b"", type=tarfile.DIRTYPE, mode=0o755), link(f"{path}{letter}", step)]
        path = f"{path}{letter}/"
    assert len(f"{step}/" * 16) > longest - 300
    last = f"{path}{'l' * 254}"
    members.append(link(last, "../" * 16))
    outside = f"{last}/../../../outside"
    return [*members, link("escape", f"{last}/../../.."), member("escape/outside"), member(outside)]


def _raw(head: Callable[[bytearray], None], folder: Path, *, tail: bytes = b"") -> list[str]:
    """A tar whose first header is changed after it was made."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info, content = member("a/1.txt")
        archive.addfile(info, io.BytesIO(content))
    raw = bytearray(buffer.getvalue())
    head(raw)
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    (folder / "bad.tar").write_bytes(bytes(raw) + tail)
    return extracted("bad.tar", folder)


def _size(value: bytes) -> Callable[[bytearray], None]:
    def change(raw: bytearray) -> None:
        raw[124:136] = value

    return change


def _kind(letter: bytes, size: int) -> Callable[[bytearray], None]:
    def change(raw: bytearray) -> None:
        raw[156:157] = letter
        raw[124:136] = b"%011o\0" % size

    return change


def _gzip_bomb(folder: Path) -> list[str]:
    """A .tar.gz of 60 MB that unpacks to 60 GB of one file."""
    info, _ = member("a/1.bin", b"")
    info.size = 60 * 2**30
    block = gzip.compress(bytes(64 * MIB), 9)
    with (folder / "bad.tar.gz").open("wb") as file:
        file.write(gzip.compress(info.tobuf()))
        for _ in range(960):
            file.write(block)
    return extracted("bad.tar.gz", folder)


def _zip_bomb(folder: Path) -> list[str]:
    bomb(folder / "bad.zip", "a/1.bin", b"", 6 * 2**30)
    return extracted("bad.zip", folder)


def _zip(members: Sequence[tuple[str, bytes]], folder: Path) -> list[str]:
    (folder / "bad.zip").write_bytes(zipped(members))
    return extracted("bad.zip", folder)


def _zip_link(folder: Path) -> list[str]:
    info = zipfile.ZipInfo("out")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(folder / "bad.zip", "w") as archive:
        archive.writestr(info, "..")
        archive.writestr("out/outside", b"x")
    return extracted("bad.zip", folder)


def _negative() -> bytes:
    """A size below 0 in the binary form of GNU tar."""
    return b"\xff" * 4 + struct.pack(">q", -1024)


TARS: Mapping[str, Callable[[Path], Sequence[Member]]] = {
    "a way out": lambda folder: [member("../../outside")],
    "an absolute name": lambda folder: [member(str(folder.parent / "outside"))],
    "a link out and a file through it": lambda folder: [link("out", "../../.."), member("out/outside")],
    "a link by an absolute path": lambda folder: [link("out", str(folder.parent)), member("out/outside")],
    "links that resolve too long (CVE-2025-4517)": _long_way_out,
    "a hard link to a file outside": lambda folder: [link("out", "/etc/passwd", tarfile.LNKTYPE)],
    "a hard link within": lambda folder: [member("a"), link("b", "a", tarfile.LNKTYPE)],
    "a device": lambda folder: [member("dev", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=5)],
    "a pipe": lambda folder: [member("pipe", b"", type=tarfile.FIFOTYPE)],
    "an escape in a name": lambda folder: [member(f"a{ESCAPE}")],
    "the same name as a file and a folder": lambda folder: [member("a"), member("a/b")],
    "a name of 5000 letters": lambda folder: [member("n" * 5000)],
    "5000 folders deep": lambda folder: [member("d/" * 5000 + "x")],
}
RAW: Mapping[str, Callable[[Path], list[str]]] = {
    "empty": lambda folder: _bytes(b"", folder),
    "noise": lambda folder: _bytes(bytes(range(256)) * 16, folder),
    "a size below 0 (CVE-2025-8194)": partial(_raw, _size(_negative())),
    "a size past the end": partial(_raw, _size(b"77777777777\0")),
    "a long name of 8 GB": partial(_raw, _kind(b"L", 2**33 - 1)),
    "a header of 8 GB": partial(_raw, _kind(b"x", 2**33 - 1)),
    "a header of 1 MB of digits (CVE-2024-6232)": partial(_raw, _kind(b"x", 2**20), tail=b"1" * 2**20 + bytes(1024)),
    "a sparse file of 8 EB": partial(_raw, _kind(b"S", 0)),
}


def _bytes(content: bytes, folder: Path) -> list[str]:
    (folder / "bad.tar").write_bytes(content)
    return extracted("bad.tar", folder)


def _pipe(folder: Path) -> list[str]:
    os.mkfifo(folder / "bad.tar")
    return extracted("bad.tar", folder)


CASES = (
    *(Case(GROUP, f"tar, {name}", partial(_tar, members), "bad.tar") for name, members in TARS.items()),
    *(Case(GROUP, f"tar, {name}", make, "bad.tar") for name, make in RAW.items()),
    Case(GROUP, "tar, a pipe instead of it", _pipe, "bad.tar"),
    Case(GROUP, "tar.gz of 60 GB", _gzip_bomb, "bad.tar.gz"),
    Case(GROUP, "zip of 6 GB", _zip_bomb, "bad.zip"),
    Case(GROUP, "zip, a way out", partial(_zip, [("../outside", b"x")]), "bad.zip"),
    Case(GROUP, "zip, a way out for Windows", partial(_zip, [("..\\outside", b"x")]), "bad.zip"),
    Case(GROUP, "zip, an absolute name", partial(_zip, [("/tmp/outside", b"x")]), "bad.zip"),
    Case(GROUP, "zip, an escape in a name", partial(_zip, [(f"a{ESCAPE}", b"x")]), "bad.zip"),
    Case(GROUP, "zip, a link out", _zip_link, "bad.zip"),
)
