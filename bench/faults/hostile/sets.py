"""Hostile data sets: arrays, IDX, CIFAR, pictures and tables, for `leaktight audit`."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy._core import multiarray
from PIL import Image

from bench.faults.hostile.case import Case
from bench.faults.hostile.tensors import ESCAPE, MIB, bomb, npy, zipped

GROUP = "data set"


def audited(kind: str, folder: Path, **settings: str) -> list[str]:
    """The command that loads a data set of this kind from the folder."""
    lines = [f"[data]\nkind = '{kind}'", *(f"{name} = {value!r}" for name, value in settings.items())]
    lines.append("[partition]\nkind = 'iid'\nclients = 2\n[federation]\nper_round = 2")
    (folder / "config.toml").write_text("\n".join(lines))
    return ["audit", str(folder / "config.toml"), "--dry-run", "--data-root", str(folder)]


def _arrays(content: Callable[[], bytes], folder: Path) -> list[str]:
    (folder / "bad.npz").write_bytes(content())
    return audited("arrays", folder, path=str(folder / "bad.npz"))


def _images_bomb(shape: tuple[int, ...], descr: str, size: int, folder: Path) -> list[str]:
    """Images of zeros that take much more memory than the file."""
    labels = np.arange(shape[0]) % 2
    path = folder / "bad.npz"
    bomb(path, "images.npy", npy(shape, descr), size)
    buffer = io.BytesIO()
    np.save(buffer, labels)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("labels.npy", buffer.getvalue())
    return audited("arrays", folder, path=str(path))


def _labelled(labels: npt.ArrayLike, images: npt.ArrayLike | None = None) -> bytes:
    buffer = io.BytesIO()
    pictures = np.zeros((4, 8, 8), np.uint8) if images is None else images
    np.savez(buffer, images=pictures, labels=np.array(labels))
    return buffer.getvalue()


WRONG_LABELS = ("a label of 10^15", "labels below 0", "labels past 63 bits")
ARRAYS: Mapping[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "noise": lambda: bytes(range(256)),
    "objects": lambda: _labelled(np.array([{}, 1, 2, 3], dtype=object)),
    "a label of 10^15": lambda: _labelled([0, 1, 0, 10**15]),
    "labels below 0": lambda: _labelled([0, 1, 0, -5]),
    "labels past 63 bits": lambda: _labelled(np.array([0, 1, 0, 2**64 - 1], np.uint64)),
    "labels that are floats": lambda: _labelled([0.5, np.nan, 1, 2]),
    "no images": lambda: _labelled(np.zeros(0, np.int64), np.zeros((0, 8, 8), np.uint8)),
    "images of no pixels": lambda: _labelled([0, 1, 0, 1], np.zeros((4, 0, 0), np.uint8)),
    "images of NaN": lambda: _labelled([0, 1, 0, 1], np.full((4, 8, 8), np.nan)),
    "images of infinity": lambda: _labelled([0, 1, 0, 1], np.full((4, 8, 8), np.inf)),
    "one image of 2^40 pixels": lambda: zipped(
        [("images.npy", npy((1, 2**20, 2**20), "|u1", bytes(64))), ("labels.npy", npy((1,), "<i8", bytes(8)))]
    ),
    "negative shapes": lambda: zipped(
        [("images.npy", npy((-4, -8, 8), "|u1", bytes(256))), ("labels.npy", npy((4,), "<i8", bytes(32)))]
    ),
    "an escape in a name": lambda: zipped([(f"a{ESCAPE}.npy", npy((2,), data=bytes(8)))]),
    "100 000 other arrays": lambda: zipped([(f"a{place}.npy", b"") for place in range(100_000)]),
}


def _idx(dims: tuple[int, ...], content: bytes, folder: Path, end: str = "") -> list[str]:
    place = folder / "mnist"
    place.mkdir()
    head = bytes((0, 0, 8, len(dims))) + struct.pack(f">{len(dims)}I", *dims)
    data = head + content
    (place / f"train-images-idx3-ubyte{end}").write_bytes(gzip.compress(data) if end else data)
    labels = bytes((0, 0, 8, 1)) + struct.pack(">I", 4) + bytes(4)
    (place / "train-labels-idx1-ubyte").write_bytes(labels)
    return audited("mnist", folder)


def _idx_bomb(folder: Path) -> list[str]:
    """6 GB of zeros in a few MB of gzip."""
    words = _idx((6000, 1000, 1000), b"", folder)
    plain = folder / "mnist" / "train-images-idx3-ubyte"
    head = plain.read_bytes()
    plain.unlink()
    with gzip.open(f"{plain}.gz", "wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(360):
            file.write(bytes(16 * MIB))
    return words


def _special_idx(make: Callable[[Path], None], folder: Path) -> list[str]:
    words = _idx((4, 8, 8), bytes(256), folder)
    plain = folder / "mnist" / "train-images-idx3-ubyte"
    plain.unlink()
    make(plain)
    return words


def _cifar(content: Callable[[], bytes], folder: Path) -> list[str]:
    (folder / "cifar-10-batches-py").mkdir()
    (folder / "cifar-10-batches-py" / "data_batch_1").write_bytes(content())
    return audited("cifar10", folder)


def _reconstructed(shape: tuple[int, ...], code: str = "b") -> bytes:
    """A pickle that asks numpy for an array of this shape before any data follows."""

    class Asked:
        def __reduce__(self) -> tuple[object, ...]:
            return multiarray._reconstruct, (np.ndarray, shape, code)

    return pickle.dumps({"data": Asked(), "labels": [0]}, 4)


CIFAR: Mapping[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "noise": lambda: bytes(range(256)),
    "cut off": lambda: pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]})[:-50],
    "an array of 100 GB": lambda: _reconstructed((100_000_000_000,)),
    "an array of 3 GB": lambda: _reconstructed((3_000_000_000,)),
    "a key nested a million deep": lambda: b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.",
    "labels that are text": lambda: pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": ["a", "b"]}, 4),
    "labels past 64 bits": lambda: pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [2**80]}, 4),
    "keys with escapes": lambda: pickle.dumps({f"a{ESCAPE}": 1}, 2),
    "a string of 2^62 bytes": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
    "a memo of 2^31 entries": lambda: b"\x80\x02}r\xff\xff\xff\x7f.",
}


def _picture(name: str, content: Callable[[], bytes], folder: Path) -> list[str]:
    """Class folders of honest pictures, with one bad file among them."""
    for label in ("a", "b"):
        (folder / "set" / label).mkdir(parents=True)
        for place in range(40):
            Image.new("RGB", (8, 8)).save(folder / "set" / label / f"{place}.png")
    (folder / "set" / "a" / name).write_bytes(content())
    return audited("image_folder", folder, path=str(folder / "set"))


def _special_picture(make: Callable[[Path], None], folder: Path) -> list[str]:
    words = _picture("bad.png", bytes, folder)
    (folder / "set" / "a" / "bad.png").unlink()
    make(folder / "set" / "a" / "bad.png")
    return words


def png(width: int, height: int, rows: bytes = b"", *more: bytes) -> bytes:
    """A PNG of any announced size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _text_chunk(size: int) -> bytes:
    data = b"a\0\0" + zlib.compress(bytes(size), 9)
    return struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(%s) (w) file closefile\nshowpage\n"
HARMLESS = ("9 000 pixels a side", "an animation of 5 000 frames")
"""Large, but within the limits."""
PICTURES: Mapping[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "noise": lambda: bytes(range(256)),
    "cut off": lambda: png(64, 64, bytes(64 * 193))[:-60],
    "2^31 pixels a side": lambda: png(2**31 - 1, 2**31 - 1),
    "100 000 pixels a side": lambda: png(100_000, 100_000),
    "no pixels": lambda: png(0, 0),
    "9 000 pixels a side": lambda: png(9_000, 9_000, bytes(9_000 * 27_001)),
    "text that unpacks to 1 GB": lambda: png(8, 8, bytes(8 * 25), _text_chunk(2**30)),
    "PostScript under another name": lambda: EPS,
    "a PPM of any size": lambda: b"P6\n99999999 99999999\n255\n",
    "a PPM with a long number": lambda: b"P6\n" + b"9" * 10_000 + b" 8\n255\n",
    "an animation of 5 000 frames": lambda: _animation(),
}


def _animation() -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("L", (8, 8), value % 256) for value in range(5_000)]
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def _zip_set(members: Callable[[], list[tuple[str, bytes]]], folder: Path) -> list[str]:
    (folder / "bad.zip").write_bytes(zipped(members(), packed=True))
    return audited("image_folder", folder, path=str(folder / "bad.zip"))


ZIPS: Mapping[str, Callable[[], list[tuple[str, bytes]]]] = {
    "a member of 400 MB of zeros": lambda: [("a/1.png", bytes(400 * MIB)), ("b/1.png", b"")],
    "a way out": lambda: [("../../a/1.png", b""), ("b/1.png", b"")],
    "an absolute name": lambda: [("/tmp/a/1.png", b"")],
    "an escape in a name": lambda: [(f"a{ESCAPE}/1.png", b"")],
    "no members": list,
}


def _many_members(folder: Path) -> list[str]:
    """A zip with 3 million members of nothing."""
    entry = (
        struct.pack("<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 3, 20, 0, 0, 0, 0, 0x21, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    )
    count = 3_000_000
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count % 65536, count % 65536, len(entry) * count, 0, 0)
    with (folder / "bad.zip").open("wb") as file:
        file.write(entry * count)
        file.write(end)
    return audited("image_folder", folder, path=str(folder / "bad.zip"))


def _table(kind: str, files: Callable[[], Mapping[str, bytes]], folder: Path) -> list[str]:
    for name, content in files().items():
        (folder / kind).mkdir(exist_ok=True)
        (folder / kind / name).write_bytes(content)
    return audited(kind, folder)


LAUGHS = (
    b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "lol">'
    + b"".join(b'<!ENTITY %c "%b">' % (letter, b"&%c;" % (letter - 1) * 10) for letter in b"bcdefghijk")
    + b"]><tagset><image><imageName>&k;</imageName></image></tagset>"
)
TABLES: Mapping[str, tuple[str, Callable[[], Mapping[str, bytes]]]] = {
    "XML that grows": ("svt", lambda: {"train.xml": LAUGHS, "test.xml": LAUGHS}),
    "XML nested 200 000 deep": ("svt", lambda: {"train.xml": b"<a>" * 200_000, "test.xml": b""}),
    "XML with a huge box": (
        "svt",
        lambda: {
            "train.xml": b'<t><image><imageName>a</imageName><taggedRectangle x="1e999" y="nan" width="1" height="1"/>'
            b"</image></t>",
            "test.xml": b"<t/>",
        },
    ),
    "a CSV field of 10 MB": ("iiit5k", lambda: {"labels.csv": b'"' + b"a" * 10_000_000 + b'",b\n'}),
    "a CSV with NUL": ("iiit5k", lambda: {"labels.csv": b"a\0b,c\n"}),
    "a CSV with escapes": ("iiit5k", lambda: {"labels.csv": b"\x1b[2J,c\n"}),
    "a MATLAB file of noise": ("iiit5k", lambda: {"traindata.mat": bytes(range(256)) * 8}),
    "a MATLAB file that unpacks to 3 GB": ("iiit5k", lambda: {"traindata.mat": _matlab(3 * 2**30)}),
}


def _matlab(size: int) -> bytes:
    """A MATLAB file with one packed variable of so many bytes."""
    name = b"traindata"
    body = (
        struct.pack("<IIII", 6, 8, 9, 0)
        + struct.pack("<IIII", 5, 8, 1, size - 100)
        + struct.pack("<II", 1, len(name))
        + name.ljust(16, b"\0")
    )
    body += struct.pack("<II", 2, size - 100)
    packer = zlib.compressobj(1)
    parts = [packer.compress(struct.pack("<II", 14, size) + body)]
    parts += [packer.compress(bytes(16 * MIB)) for _ in range(size // (16 * MIB))]
    packed = b"".join(parts) + packer.flush()
    return (
        b"MATLAB 5.0 MAT-file".ljust(124)
        + struct.pack("<H2s", 0x0100, b"IM")
        + struct.pack("<II", 15, len(packed))
        + packed
    )


SPECIAL: Mapping[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
}


def _special_arrays(make: Callable[[Path], None], folder: Path) -> list[str]:
    make(folder / "bad.npz")
    return audited("arrays", folder, path=str(folder / "bad.npz"))


def _truth(content: Callable[[], bytes], folder: Path) -> list[str]:
    import torch

    from bench.faults.hostile.tensors import honest

    torch.save(honest(), folder / "before.pt")
    torch.save({name: each + 1 for name, each in honest().items()}, folder / "after.pt")
    (folder / "bad.npz").write_bytes(content())
    words = ["inspect", "--model", "logistic_regression", "--shape", "1,8,8", "--dry-run"]
    return [
        *words,
        "--before",
        str(folder / "before.pt"),
        "--after",
        str(folder / "after.pt"),
        "--truth",
        str(folder / "bad.npz"),
    ]


CASES = (
    *(Case(GROUP, f"arrays, {name}", partial(_arrays, content), "bad.npz") for name, content in ARRAYS.items()),
    Case(
        GROUP,
        "arrays, 5.7 GB of bytes",
        partial(_images_bomb, (57_000, 316, 316), "|u1", 57_000 * 316 * 316),
        "bad.npz",
    ),
    Case(
        GROUP,
        "arrays, 5.7 GB of a wrong kind",
        partial(_images_bomb, (57_000, 158, 158), "<i4", 57_000 * 158 * 158 * 4),
        "bad.npz",
    ),
    *(Case(GROUP, f"arrays, {name}", partial(_special_arrays, make), "bad.npz") for name, make in SPECIAL.items()),
    Case(GROUP, "IDX, 2^96 bytes", partial(_idx, (2**32 - 1,) * 3, bytes(64)), "idx3-ubyte"),
    Case(GROUP, "IDX, 4 GB announced", partial(_idx, (2**12, 2**10, 2**10), bytes(64)), "idx3-ubyte"),
    Case(GROUP, "IDX, no images", partial(_idx, (0, 0, 0), b""), "idx"),
    Case(GROUP, "IDX, cut off", partial(_idx, (4, 8, 8), bytes(100)), "idx3-ubyte"),
    Case(GROUP, "IDX, gzip of 6 GB", _idx_bomb, "idx3-ubyte"),
    *(Case(GROUP, f"IDX, {name}", partial(_special_idx, make), "idx3-ubyte") for name, make in SPECIAL.items()),
    *(Case(GROUP, f"CIFAR, {name}", partial(_cifar, content), "data_batch_1") for name, content in CIFAR.items()),
    *(
        Case(
            GROUP,
            f"picture, {name}",
            partial(_picture, "bad.png", content),
            "bad.png",
            (0,) if name in HARMLESS else (2,),
        )
        for name, content in PICTURES.items()
    ),
    *(Case(GROUP, f"picture, {name}", partial(_special_picture, make), "bad.png") for name, make in SPECIAL.items()),
    *(Case(GROUP, f"zip, {name}", partial(_zip_set, members), "bad.zip") for name, members in ZIPS.items()),
    Case(GROUP, "zip, 3 million members", _many_members, "bad.zip"),
    *(Case(GROUP, f"words, {name}", partial(_table, kind, files), kind) for name, (kind, files) in TABLES.items()),
    *(
        Case(
            GROUP,
            f"truth, {name}",
            partial(_truth, content),
            "truth" if name in WRONG_LABELS else "bad.npz",
        )
        for name, content in ARRAYS.items()
    ),
)
