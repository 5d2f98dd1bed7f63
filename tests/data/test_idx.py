from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from leaktight.core.errors import DataError
from leaktight.data.idx import Emnist, FashionMnist, Mnist, read_idx


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_part(folder: Path, stem: str, labels: list[int], *, packed: bool = True, seed: int = 0) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(seed).integers(0, 256, (len(labels), 28, 28))
    for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", np.array(labels))):
        data = idx(array)
        if packed:
            (folder / f"{stem}-{name}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / f"{stem}-{name}").write_bytes(data)
    return images


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "mnist/MNIST/raw", "mnist/raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_in_every_place(tmp_path: Path, folder: str, packed: bool) -> None:
    images = write_part(tmp_path / folder, "train", [3, 9, 0], packed=packed)
    write_part(tmp_path / folder, "t10k", [1], packed=packed)
    data = Mnist().load(tmp_path)
    assert data.name == "mnist"
    assert data.inputs.shape == (1, 28, 28)
    assert data.train.targets.tolist() == [3, 9, 0]
    assert data.test.targets.tolist() == [1]
    assert torch.equal(data.train.inputs[:, 0], torch.from_numpy(images.astype(np.uint8)))


def test_size(tmp_path: Path) -> None:
    write_part(tmp_path / "mnist", "train", [3, 9])
    write_part(tmp_path / "mnist", "t10k", [1])
    assert Mnist(size=32).load(tmp_path).inputs.shape == (1, 32, 32)


def test_one_part_alone(tmp_path: Path) -> None:
    write_part(tmp_path / "fashion_mnist", "t10k", [0, 1] * 10)
    with pytest.raises(DataError) as caught:
        FashionMnist().load(tmp_path)
    for words in ("train-images-idx3-ubyte", "`leaktight data fashion_mnist`", 'set part = "test"'):
        assert words in str(caught.value)
    data = FashionMnist(part="test").load(tmp_path)
    assert (len(data.train), len(data.test)) == (16, 4)
    assert data.test.targets.tolist().count(0) == 2


def test_missing_altogether(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Mnist().load(tmp_path)
    assert "set part" not in str(caught.value)
    assert f"{tmp_path / 'mnist'} or {tmp_path / 'MNIST' / 'raw'}" in str(caught.value)


def test_emnist_is_turned_upright(tmp_path: Path) -> None:
    stored = write_part(tmp_path / "emnist", "emnist-balanced-train", [46, 10])
    write_part(tmp_path / "emnist", "emnist-balanced-test", [0])
    data = Emnist().load(tmp_path)
    assert torch.equal(data.train.inputs[0, 0], torch.from_numpy(stored[0].T.astype(np.uint8)))
    assert data.num_classes == 47
    assert data.class_names[10] == "A"


def test_emnist_letters_start_at_one(tmp_path: Path) -> None:
    write_part(tmp_path / "EMNIST" / "raw", "emnist-letters-train", [1, 26])
    write_part(tmp_path / "EMNIST" / "raw", "emnist-letters-test", [2])
    data = Emnist(split="letters").load(tmp_path)
    assert data.train.targets.tolist() == [0, 25]
    assert data.num_classes == 26


def test_emnist_splits_are_checked() -> None:
    with pytest.raises(ValueError, match="did you mean 'balanced'"):
        Emnist(split="balance")  # type: ignore[arg-type]


def test_label_out_of_range(tmp_path: Path) -> None:
    write_part(tmp_path / "mnist", "train", [3, 10])
    write_part(tmp_path / "mnist", "t10k", [1])
    with pytest.raises(DataError, match=r"expected training labels in 0\.\.9, got 3\.\.10"):
        Mnist().load(tmp_path)


def test_labels_of_other_images(tmp_path: Path) -> None:
    write_part(tmp_path / "mnist", "train", [3, 1])
    (tmp_path / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([1, 2, 3]))))
    with pytest.raises(DataError, match=r"expected 2 labels, one for each image of .*, got 3"):
        Mnist().load(tmp_path)


GOOD = idx(np.arange(12).reshape(3, 2, 2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD[:-1], r"expected 12 bytes of data for sizes 3 x 2 x 2, got only 11"),
        (GOOD + b"x", "expected 12 bytes of data .* got more"),
        (GOOD[:9], "expected 3 sizes after the magic"),
        (b"", r"magic 00000803\), got magic nothing"),
        (b"\x00\x00\x08\x01" + GOOD[4:], "got magic 00000801"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "got magic 00000d03"),
        (gzip.compress(GOOD, mtime=0), "got magic 1f8b"),
    ],
)
def test_damaged_idx(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "damaged-idx3-ubyte"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_good_idx(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(GOOD)
    (tmp_path / "a.gz").write_bytes(gzip.compress(GOOD))
    assert read_idx(tmp_path / "a", 3).flatten().tolist() == list(range(12))
    assert torch.equal(read_idx(tmp_path / "a", 3), read_idx(tmp_path / "a.gz", 3))


@pytest.mark.parametrize("damage", ["cut", "flip", "text"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    packed = gzip.compress(idx(np.random.default_rng(0).integers(0, 256, (50, 4, 4))), mtime=0)
    middle = len(packed) // 2
    data = {
        "cut": packed[:middle],
        "flip": packed[:middle] + bytes([packed[middle] ^ 255]) + packed[middle + 1 :],
        "text": b"<html>not found</html>",
    }[damage]
    path = tmp_path / "images.gz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"images\.gz: expected an undamaged file, got .*; fetch it again"):
        read_idx(path, 3)
