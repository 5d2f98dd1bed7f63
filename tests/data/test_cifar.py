from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leaktight.core.errors import DataError
from leaktight.data.cifar import Cifar10, Cifar100, read_pickle


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072)).astype(np.uint8)


def write_pickle(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol=4))


def write_bytes(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def records(labels: list[list[int]], pixels: np.ndarray) -> bytes:
    return np.concatenate([np.array(labels, dtype=np.uint8), pixels], axis=1).tobytes()


@pytest.mark.parametrize("outer", ["", "cifar10"])
def test_cifar10_python_reads_the_batches_that_are_there(tmp_path: Path, outer: str) -> None:
    folder = tmp_path / outer / "cifar-10-batches-py"
    first, second = rows(2), rows(1, seed=1)
    write_pickle(folder / "data_batch_1", {b"data": first, b"labels": [3, 9]})
    write_pickle(folder / "data_batch_4", {"data": second, "labels": [0]})
    write_pickle(folder / "test_batch", {b"data": rows(1), b"labels": [5]})
    data = Cifar10().load(tmp_path)
    assert data.train.targets.tolist() == [3, 9, 0]
    assert data.inputs.shape == (3, 32, 32)
    assert torch.equal(data.train.inputs[2], torch.from_numpy(second).view(3, 32, 32))
    assert data.class_names[5] == "dog"
    assert data.note == "3 of 5 training files are missing: data_batch_2, data_batch_3, data_batch_5"
    for number in (2, 3, 5):
        write_pickle(folder / f"data_batch_{number}", {b"data": first, b"labels": [3, 9]})
    assert not Cifar10().load(tmp_path).note


def test_cifar10_binary_equals_python(tmp_path: Path) -> None:
    pixels = rows(3)
    for folder, train, test in (("p", "data_batch_1", "test_batch"), ("b", "data_batch_1.bin", "test_batch.bin")):
        inner = tmp_path / folder / ("cifar-10-batches-py" if folder == "p" else "cifar-10-batches-bin")
        for name in (train, test):
            if folder == "p":
                write_pickle(inner / name, {b"data": pixels, b"labels": [1, 2, 3]})
            else:
                write_bytes(inner / name, records([[1], [2], [3]], pixels))
    one, two = (Cifar10().load(tmp_path / folder) for folder in ("p", "b"))
    assert torch.equal(one.train.inputs, two.train.inputs)
    assert torch.equal(one.test.targets, two.test.targets)


def test_cifar10_without_test_batch(tmp_path: Path) -> None:
    write_pickle(tmp_path / "cifar-10-batches-py" / "data_batch_1", {b"data": rows(10), b"labels": [1, 2] * 5})
    with pytest.raises(DataError, match=r'5 of 6 files are missing: .*5, test_batch in .*, or set part = "train"'):
        Cifar10().load(tmp_path)
    data = Cifar10(part="train").load(tmp_path)
    assert (len(data.train), len(data.test)) == (8, 2)


def write_cifar100(folder: Path) -> None:
    batch = {b"data": rows(2), b"fine_labels": [99, 0], b"coarse_labels": [19, 4]}
    write_pickle(folder / "train", batch)
    write_pickle(folder / "test", batch)
    write_pickle(folder / "meta", {b"fine_label_names": [f"fine {i}".encode() for i in range(100)]})


def test_cifar100_python(tmp_path: Path) -> None:
    write_cifar100(tmp_path / "cifar-100-python")
    fine, coarse = Cifar100().load(tmp_path), Cifar100(labels="coarse").load(tmp_path)
    assert fine.train.targets.tolist() == [99, 0]
    assert (fine.num_classes, fine.class_names[99]) == (100, "fine 99")
    assert coarse.train.targets.tolist() == [19, 4]
    assert (coarse.num_classes, coarse.class_names[4]) == (20, "fruit_and_vegetables")


def test_cifar100_binary(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    for part in ("train", "test"):
        write_bytes(folder / f"{part}.bin", records([[19, 99], [4, 0]], rows(2)))
    write_bytes(folder / "fine_label_names.txt", "\n".join(f"name{i}" for i in range(100)).encode())
    assert Cifar100().load(tmp_path).train.targets.tolist() == [99, 0]
    assert Cifar100(labels="coarse").load(tmp_path).train.targets.tolist() == [19, 4]


def test_cifar100_npz_is_one_part(tmp_path: Path) -> None:
    (tmp_path / "cifar100").mkdir()
    np.savez(
        tmp_path / "cifar100" / "cifar100_test_10.npz",
        images=rows(10).reshape(10, 32, 32, 3),
        fine=np.repeat([7, 8], 5),
        coarse=np.repeat([1, 2], 5),
        fine_label_names=np.array([str(number) for number in range(100)]),
    )
    with pytest.raises(DataError, match=r'expected train, .*set part = "test"'):
        Cifar100().load(tmp_path)
    data = Cifar100(part="test").load(tmp_path)
    assert (data.test.targets.tolist(), len(data.train)) == ([7, 8], 8)


def test_labels_setting_is_checked() -> None:
    with pytest.raises(ValueError, match="expected labels fine or coarse"):
        Cifar100(labels="rough")  # type: ignore[arg-type]


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_malicious_pickles_are_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    write_bytes(path, pickle.dumps({"data": Evil(mark)}, protocol=protocol))
    with pytest.raises(DataError, match=r"data_batch_1: .* asks for (posix|nt)\.system; do not trust this file"):
        Cifar10().load(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "stream",
    [
        b"cbuiltins\neval\n(S'1+1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nfromfile\n(S'x'\ntR.",
        b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.dump\x93.",
    ],
)
def test_other_globals_are_refused_too(tmp_path: Path, stream: bytes) -> None:
    (tmp_path / "x").write_bytes(stream)
    with pytest.raises(DataError, match="asks for"):
        read_pickle(tmp_path / "x")


def test_python_2_pickles_of_arrays_are_read(tmp_path: Path) -> None:
    # What Python 2 wrote: byte strings for keys and data, and the old name of the module.
    stream = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x03\x85cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x03\x01\x02\xfftbU\x06labels]K\x07au."
    )
    (tmp_path / "x").write_bytes(stream)
    found = read_pickle(tmp_path / "x")
    assert np.array_equal(np.asarray(found["data"]), [1, 2, 255])
    assert found["labels"] == [7]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected an undamaged pickle, got ValueError: pickle exhausted"),
        (pickle.dumps({"data": rows(2)}, protocol=4)[:100], "expected an undamaged pickle"),
        (b"<html>", "expected an undamaged pickle"),
        (pickle.dumps([1], protocol=4), "expected a pickled dictionary, got list"),
        (pickle.dumps({"data": rows(2)}, protocol=4), "expected the keys data and labels, got data"),
        (pickle.dumps({"data": rows(2), "labels": [1]}, protocol=4), r"expected data \(1, 3072\)"),
        (pickle.dumps({"data": "x", "labels": [1]}, protocol=4), "one row per label, got str"),
    ],
)
def test_damaged_batches(tmp_path: Path, data: bytes, message: str) -> None:
    write_bytes(tmp_path / "cifar-10-batches-py" / "data_batch_1", data)
    with pytest.raises(DataError, match=message) as caught:
        Cifar10().load(tmp_path)
    assert "data_batch_1" in str(caught.value)


def test_truncated_binary(tmp_path: Path) -> None:
    write_bytes(tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin", bytes(3072))
    with pytest.raises(DataError, match=r"data_batch_1\.bin: expected a multiple of 3073 bytes, got 3072"):
        Cifar10().load(tmp_path)


def test_label_out_of_range(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    for name in ("data_batch_1", "test_batch"):
        write_pickle(folder / name, {"data": rows(1), "labels": [10]})
    with pytest.raises(DataError, match=r"expected training labels in 0\.\.9"):
        Cifar10().load(tmp_path)
