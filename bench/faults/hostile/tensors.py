"""Hostile files of tensors, for `leaktight inspect`."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.faults.hostile.case import Case

GROUP = "tensor file"
SIDE = 8
MIB = 2**20
ESCAPE = "\x1b[2J\x1b]0;owned\x07"


def honest() -> dict[str, Tensor]:
    """A state dict that fits `logistic_regression` on images 1x8x8 of 10 classes."""
    return {"classifier.weight": torch.zeros(10, SIDE * SIDE), "classifier.bias": torch.ones(10)}


def inspect(file: str, folder: Path) -> list[str]:
    """The command that reads this file as the model before and after."""
    path = str(folder / file)
    words = ["inspect", "--model", "logistic_regression", "--shape", f"1,{SIDE},{SIDE}", "--dry-run"]
    return [*words, "--before", path, "--after", path]


def saved(content: Callable[[], object], folder: Path) -> list[str]:
    torch.save(content(), folder / "bad.pt")
    return inspect("bad.pt", folder)


def written(file: str, content: bytes, folder: Path) -> list[str]:
    (folder / file).write_bytes(content)
    return inspect(file, folder)


def made(file: str, content: Callable[[], bytes], folder: Path) -> list[str]:
    return written(file, content(), folder)


def safetensors_header(header: Mapping[str, object] | bytes, data: bytes = b"") -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


def npy(shape: Sequence[object], descr: str = "<f4", data: bytes = b"") -> bytes:
    """The bytes of an .npy file whose header may say anything."""
    text = repr({"descr": descr, "fortran_order": False, "shape": tuple(shape)}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def zipped(members: Sequence[tuple[str, bytes]], *, packed: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def bomb(path: Path, name: str, head: bytes, zeros: int) -> None:
    """Write a zip with one member of `head` and so many zero bytes."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open(name, "w", force_zip64=True) as member,
    ):
        member.write(head)
        block = bytes(16 * MIB)
        for start in range(0, zeros, len(block)):
            member.write(block[: zeros - start])


def _torch_bomb(folder: Path) -> list[str]:
    """A saved state dict whose storage of 4 GB of zeros is packed."""
    floats = 2**30
    buffer = io.BytesIO()
    torch.save({"classifier.weight": torch.zeros(1)}, buffer)
    content = zipfile.ZipFile(io.BytesIO(buffer.getvalue()))
    path = folder / "bad.pt"
    inner = {info.filename: content.read(info) for info in content.infolist()}
    data = next(name for name in inner if name.endswith("data/0"))
    bomb(path, data, b"", 4 * floats)
    with zipfile.ZipFile(path, "a") as archive:
        for name, value in inner.items():
            if name != data:
                # the number of elements in the pickle, and the size of the tensor
                grown = value.replace(b"K\x01", b"J" + struct.pack("<i", floats)) if name.endswith(".pkl") else value
                archive.writestr(name, grown)
    return inspect("bad.pt", folder)


def _many_operations(folder: Path) -> list[str]:
    """A zip as torch writes it, with a pickle of 40 million operations."""
    body = b"\x80\x02}" + b"N" * 40_000_000 + b"."
    return written(
        "bad.pt", zipped([("bad/data.pkl", body), ("bad/version", b"3\n"), ("bad/byteorder", b"little")]), folder
    )


def _nested_key(levels: int, folder: Path) -> list[str]:
    """A pickle with a dict whose key is a tuple in a tuple in a tuple ..."""
    body = b"\x80\x02})" + b"\x85" * levels + b"Ns."
    return written(
        "bad.pt", zipped([("bad/data.pkl", body), ("bad/version", b"3\n"), ("bad/byteorder", b"little")]), folder
    )


def _legacy(body: bytes, folder: Path) -> list[str]:
    """The format of torch before 1.6: pickles one after another."""
    magic = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}]
    return written("bad.pth", b"".join(pickle.dumps(each, 2) for each in magic) + body, folder)


def _fifo(file: str, folder: Path) -> list[str]:
    os.mkfifo(folder / file)
    return inspect(file, folder)


def _link(file: str, target: str, folder: Path) -> list[str]:
    (folder / file).symlink_to(target)
    return inspect(file, folder)


def _npz_bomb(folder: Path) -> list[str]:
    """5.7 GB of zeros in a file of a few MB."""
    shape = (10, 140_000_000)
    bomb(folder / "bad.npz", "classifier.weight.npy", npy(shape), 4 * shape[0] * shape[1])
    return inspect("bad.npz", folder)


def _sparse_file(file: str, head: bytes, size: int, folder: Path) -> list[str]:
    """A file that is mostly a hole: many bytes that take no place on disk."""
    with (folder / file).open("wb") as opened:
        opened.write(head)
        opened.truncate(size)
    return inspect(file, folder)


def _named(name: str) -> dict[str, Tensor]:
    return {**honest(), name: torch.zeros(1)}


class _Trap:
    """Makes a folder when it is unpickled without protection."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def _trap(file: str, protocol: int, folder: Path) -> list[str]:
    mark = _Trap(folder / "ran")
    if file.endswith(".npz"):
        np.savez(folder / file, allow_pickle=True, weight=np.array([mark], dtype=object))
    elif protocol == 0:
        torch.save({"classifier.weight": mark}, folder / file)
    else:
        (folder / file).write_bytes(pickle.dumps({"classifier.weight": mark}, protocol))
    return inspect(file, folder)


TRAPS = tuple(
    Case("pickle with code", f"{file}, protocol {protocol}", partial(_trap, file, protocol), file)
    for file, protocol in (
        *(("bad.pt", 0), ("bad.pt", 2), ("bad.pt", 3), ("bad.pth", 4), ("bad.pth", 5), ("bad.npz", 0)),
    )
)
"""Files that run code where pickles are trusted; they make the folder `ran`."""


def _pickled() -> Iterator[tuple[str, Callable[[Path], Sequence[str]]]]:
    yield "cut off", lambda folder: written("bad.pt", _bytes(honest())[:-400], folder)
    yield "empty", lambda folder: written("bad.pt", b"", folder)
    yield "noise", lambda folder: written("bad.pt", bytes(range(256)) * 40, folder)
    yield "a packed storage of 4 GB", _torch_bomb
    yield "40 million operations", _many_operations
    yield "a key nested 100 000 deep", partial(_nested_key, 100_000)
    yield "a key nested 2 million deep", partial(_nested_key, 2_000_000)
    yield (
        "an expanded tensor of 4 TB",
        partial(saved, lambda: {**honest(), "classifier.weight": torch.zeros(1).expand(10, 10**11)}),
    )
    yield (
        "an expanded tensor that overflows",
        partial(saved, lambda: {"classifier.weight": torch.zeros(1).expand(2**31, 2**31)}),
    )
    yield (
        "a sparse tensor of 4 TB",
        partial(
            saved,
            lambda: {
                "classifier.weight": torch.sparse_coo_tensor(
                    torch.zeros(2, 1, dtype=torch.long), torch.ones(1), (10**6, 10**6)
                )
            },
        ),
    )
    yield (
        "a tensor without memory",
        partial(
            saved, lambda: {"classifier.weight": torch.empty(10, 64, device="meta"), "classifier.bias": torch.ones(10)}
        ),
    )
    yield (
        "complex numbers",
        partial(saved, lambda: {**honest(), "classifier.weight": torch.zeros(10, 64, dtype=torch.complex64)}),
    )
    yield (
        "float8",
        partial(saved, lambda: {**honest(), "classifier.weight": torch.zeros(10, 64).to(torch.float8_e4m3fn)}),
    )
    yield (
        "quantised",
        partial(
            saved,
            lambda: {
                **honest(),
                "classifier.weight": torch.quantize_per_tensor(torch.zeros(10, 64), 0.1, 0, torch.qint8),
            },
        ),
    )
    yield "an escape in a name", partial(saved, lambda: _named(f"evil{ESCAPE}"))
    yield "a forged line in a name", partial(saved, lambda: _named("evil\nleaktight: all is well"))
    yield "a name of 5 MB", partial(saved, lambda: _named("n" * 5_000_000))
    yield (
        "names that are not text",
        partial(saved, lambda: {1: torch.zeros(1), (2, 3): torch.zeros(1), None: torch.zeros(1)}),
    )
    yield (
        "200 000 tensors",
        partial(saved, lambda: collections.OrderedDict((f"n{place}", torch.zeros(0)) for place in range(200_000))),
    )
    yield "no tensors", partial(saved, dict)
    yield (
        "tensors of no elements",
        partial(saved, lambda: {"classifier.weight": torch.zeros(0, 64), "classifier.bias": torch.zeros(0)}),
    )
    yield "NaN everywhere", partial(saved, lambda: {name: tensor * float("nan") for name, tensor in honest().items()})
    yield "legacy: huge storage", lambda folder: _legacy(_legacy_storage(2**45), folder)
    yield "legacy: 40 million operations", lambda folder: _legacy(b"\x80\x02}" + b"N" * 40_000_000 + b".", folder)
    yield "a tar", lambda folder: written("bad.pt", b"storages\0" + bytes(2048), folder)


def _legacy_storage(elements: int) -> bytes:
    class Saved(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", torch.FloatStorage, "0", "cpu", elements, None) if value is asked else None

    class Rebuilt:
        def __reduce__(self) -> tuple[object, ...]:
            rebuild = torch._utils._rebuild_tensor_v2
            return rebuild, (asked, 0, (elements,), (1,), False, collections.OrderedDict())

    asked = object()
    buffer = io.BytesIO()
    Saved(buffer, 2).dump({"classifier.weight": Rebuilt()})
    return buffer.getvalue() + pickle.dumps(["0"], 2) + struct.pack("<q", elements)


def _bytes(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _others() -> Iterator[tuple[str, str, Callable[[Path], Sequence[str]]]]:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    heads: Mapping[str, Callable[[], bytes]] = {
        "empty": lambda: b"",
        "cut off": lambda: safetensors_header({"a": tensor}, bytes(4)),
        "a header of 2^60 bytes": lambda: struct.pack("<Q", 2**60) + b"{}",
        "a header that is not JSON": lambda: safetensors_header(b"{" * 1000),
        "a header nested 100 000 deep": lambda: safetensors_header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "an overflowing shape": lambda: safetensors_header({"a": {**tensor, "shape": [2**62, 2**62]}}, bytes(8)),
        "a negative shape": lambda: safetensors_header({"a": {**tensor, "shape": [-2]}}, bytes(8)),
        "offsets past the end": lambda: safetensors_header({"a": {**tensor, "data_offsets": [0, 2**50]}}, bytes(8)),
        "the same name twice": lambda: safetensors_header(
            b'{"a":%b,"a":%b}' % ((json.dumps(tensor).encode(),) * 2), bytes(8)
        ),
        "float8": lambda: safetensors_header(
            {"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}, bytes(8)
        ),
        "an escape in a name": lambda: safetensors_header({f"a{ESCAPE}": tensor}, bytes(8)),
        "a name of 20 MB": lambda: safetensors_header({"a" * 20_000_000: tensor}, bytes(8)),
        "400 000 names": lambda: safetensors_header(
            {f"n{place}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for place in range(400_000)}
        ),
        "metadata of 60 MB": lambda: safetensors_header(
            {"__metadata__": {"a": "b" * 60_000_000}, "a": tensor}, bytes(8)
        ),
    }
    for name, content in heads.items():
        yield "bad.safetensors", name, partial(made, "bad.safetensors", content)
    arrays: Mapping[str, Callable[[], bytes]] = {
        "empty": lambda: b"",
        "cut off": lambda: zipped([("a.npy", npy((4,), data=bytes(16)))])[:-30],
        "an array cut off": lambda: zipped([("a.npy", npy((4,), data=bytes(8)))]),
        "an array of 2^62 elements": lambda: zipped([("a.npy", npy((2**31, 2**31), data=bytes(8)))]),
        "a negative shape": lambda: zipped([("a.npy", npy((-4,), data=bytes(16)))]),
        "two negative sides": lambda: zipped([("a.npy", npy((-4, -4), data=bytes(64)))]),
        "an overflowing shape": lambda: zipped([("a.npy", npy((2**62, 2**62), data=bytes(8)))]),
        "a shape that is NaN": lambda: zipped([("a.npy", npy((4,)).replace(b"(4,)", b"nan "))]),
        "a shape of True": lambda: zipped([("a.npy", npy((True,), data=bytes(4)))]),
        "33 dimensions": lambda: zipped([("a.npy", npy((1,) * 65, data=bytes(4)))]),
        "a nested header": lambda: zipped([("a.npy", npy((4,)).replace(b"(4,)", b"(" * 90 + b")" * 90))]),
        "text instead of numbers": lambda: zipped([("a.npy", npy((1,), "<U4", bytes(16)))]),
        "an element of 2 GB": lambda: zipped([("a.npy", npy((1,), "|V2147483647", bytes(16)))]),
        "dates": lambda: zipped([("a.npy", npy((2,), "<M8[s]", bytes(16)))]),
        "records": lambda: zipped(
            [("a.npy", npy((1,), data=bytes(8)).replace(b"'<f4'", b"[('x','<f4'),('y','<f4')]"))]
        ),
        "complex numbers": lambda: zipped([("a.npy", npy((2,), "<c8", bytes(16)))]),
        "long doubles": lambda: zipped([("a.npy", npy((2,), "<f16", bytes(32)))]),
        "an escape in a name": lambda: zipped([(f"a{ESCAPE}.npy", npy((2,), data=bytes(8)))]),
        "path in a name": lambda: zipped([("../../a.npy", npy((2,), data=bytes(8)))]),
        "the same name twice": lambda: zipped([("a.npy", npy((2,), data=bytes(8)))] * 2),
        "a member that is no array": lambda: zipped([("a.txt", b"hello")]),
        "100 000 members": lambda: zipped([(f"a{place}.npy", b"") for place in range(100_000)]),
        "arr_ with 5000 digits": lambda: zipped([(f"arr_{'9' * 5000}.npy", npy((2,), data=bytes(8)))]),
        "encrypted": lambda: _encrypted(zipped([("a.npy", npy((2,), data=bytes(8)))])),
        "unknown packing": lambda: _repacked(zipped([("a.npy", npy((2,), data=bytes(8)))])),
        "a single array": lambda: npy((2,), data=bytes(8)),
    }
    for name, content in arrays.items():
        yield "bad.npz", name, partial(made, "bad.npz", content)
    yield "bad.npz", "5.7 GB packed into a few MB", _npz_bomb
    for file in ("bad.pt", "bad.npz", "bad.safetensors"):
        yield file, "a pipe", partial(_fifo, file)
        yield file, "a device without an end", partial(_link, file, "/dev/zero")
        yield file, "a link to itself", partial(_link, file, file)
        yield file, "a hole of 1 TB", partial(_sparse_file, file, _START[file], 2**40)
    yield "bad.npy", "a kind that is not read", partial(written, "bad.npy", npy((2,), data=bytes(8)))
    yield "bad?[2J.pt", "an escape in the file's own name", partial(written, "bad\x1b[2J.pt", b"")


_START = {
    "bad.pt": b"\x80\x02",
    "bad.npz": b"PK\x03\x04",
    "bad.safetensors": safetensors_header(
        {"a": {"dtype": "U8", "shape": [2**40 - 96], "data_offsets": [0, 2**40 - 96]}}
    ),
}


def _encrypted(archive: bytes) -> bytes:
    """The flag of encryption set in both headers of the first member."""
    changed = bytearray(archive)
    changed[6] |= 1
    changed[archive.rfind(b"PK\x01\x02") + 8] |= 1
    return bytes(changed)


def _repacked(archive: bytes) -> bytes:
    changed = bytearray(archive)
    place = archive.rfind(b"PK\x01\x02") + 10
    changed[8:10] = changed[place : place + 2] = struct.pack("<H", 77)
    return bytes(changed)


CASES = (
    *(Case(GROUP, f"pt, {name}", make, "bad.pt") for name, make in _pickled()),
    *(Case(GROUP, f"{file.partition('.')[2]}, {name}", make, file) for file, name, make in _others()),
)
