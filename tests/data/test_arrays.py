from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leaktight.core.errors import DataError
from leaktight.data.arrays import Arrays, FemnistDigits, OrlFaces


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape)).astype(np.uint8)


def save(path: Path, **arrays: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def test_arrays_are_split_by_class(tmp_path: Path) -> None:
    save(tmp_path / "mine.npz", images=pixels(20, 8, 8, 3), labels=np.repeat([0, 1], 10))
    data = Arrays(path="mine.npz").load(tmp_path)
    assert data.name == "mine"
    assert data.inputs.shape == (3, 8, 8)
    assert data.class_names == ("0", "1")
    assert data.test.targets.tolist() == [0, 0, 1, 1]
    assert data.groups is None


def test_arrays_with_every_key(tmp_path: Path) -> None:
    path = save(
        tmp_path / "mine.npz",
        x=pixels(4, 8, 8),
        y=np.array([1, 2, 1, 2]),
        u=pixels(2, 8, 8),
        v=np.array([2, 2]),
        who=np.array([70, 7, 70, 7]),
        names=np.array(["left", "right"]),
    )
    data = Arrays(
        path=str(path),
        images_key="x",
        labels_key="y",
        test_images_key="u",
        test_labels_key="v",
        group_key="who",
        names_key="names",
        first_label=1,
        size=4,
        channels=3,
    ).load(Path("elsewhere"))
    assert data.inputs.shape == (3, 4, 4)
    assert data.train.targets.tolist() == [0, 1, 0, 1]
    assert data.test.targets.tolist() == [1, 1]
    assert data.class_names == ("left", "right")
    assert data.groups is not None
    assert data.groups.tolist() == [1, 0, 1, 0]
    assert data.group_names == ("who 7", "who 70")


def test_groups_follow_their_examples(tmp_path: Path) -> None:
    groups = np.tile([0, 1, 2], 20)
    images = np.broadcast_to(groups.astype(np.uint8)[:, None, None], (60, 4, 4))
    save(tmp_path / "mine.npz", images=images, labels=np.repeat([0, 1], 30), client=groups)
    data = Arrays(path="mine.npz", group_key="client").load(tmp_path)
    assert data.groups is not None
    assert data.groups.tolist() == data.train.inputs[:, 0, 0, 0].tolist()
    # Every writer gives the same share of each class to the test part.
    assert sorted(data.test.inputs[:, 0, 0, 0].tolist()) == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": pixels(2, 4, 4)}, "expected the array 'labels', got images"),
        (
            {"images": pixels(2, 4, 4), "labels": np.array([0.5, 1.0])},
            "not supported yet: regression",
        ),
        (
            {"images": pixels(2, 4, 4), "labels": np.array([0, 1, 1])},
            "expected labels to be 2 integers, one per image, got 3 of int64",
        ),
        (
            {"images": pixels(2, 4, 4), "labels": np.array([-1, 0])},
            "images from 0 to 99999, got -1 to 0",
        ),
        ({"images": pixels(2, 4, 4), "labels": np.array([0, None])}, "expected a readable .npz without objects"),
        ({"images": pixels(1, 4, 4), "labels": np.array([0])}, "expected labels of 2 or more images .* got 1 of them"),
    ],
)
def test_strange_arrays(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    save(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=message):
        Arrays(path="mine.npz", test_share=0.5).load(tmp_path)


@pytest.mark.parametrize("damage", ["text", "cut", "single"])
def test_damaged_files(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path / "mine.npz", images=pixels(9, 4, 4), labels=np.zeros(9, dtype=int))
    if damage == "single":
        with path.open("wb") as file:
            np.save(file, pixels(9, 4, 4))
    else:
        path.write_bytes({"text": b"hello", "cut": path.read_bytes()[:300]}[damage])
    with pytest.raises(DataError, match=r"mine\.npz: expected"):
        Arrays(path="mine.npz").load(tmp_path)


def test_names_too_few(tmp_path: Path) -> None:
    save(tmp_path / "mine.npz", images=pixels(4, 4, 4), labels=np.array([0, 1, 2, 2]), names=np.array(["a", "b"]))
    with pytest.raises(DataError, match=r"labels in 0\.\.1, got"):
        Arrays(path="mine.npz", names_key="names").load(tmp_path)


def test_test_keys_come_together() -> None:
    with pytest.raises(ValueError, match="expected test_images_key and test_labels_key together"):
        Arrays(path="x", test_images_key="u")


def test_femnist_digits(tmp_path: Path) -> None:
    save(
        tmp_path / "femnist_digits" / "f.npz",
        images=pixels(40, 28, 28),
        labels=np.tile(np.arange(10), 4).astype(np.uint8),
        client=np.repeat([0, 5], 20).astype(np.uint8),
    )
    data = FemnistDigits(size=32).load(tmp_path)
    assert data.inputs.shape == (1, 32, 32)
    assert data.group_names == ("writer 0", "writer 5")
    assert data.groups is not None
    assert len(data.groups) == len(data.train)


def test_orl_faces(tmp_path: Path) -> None:
    save(tmp_path / "orl_faces" / "o.npz", images=pixels(80, 112, 92), subject=np.repeat(np.arange(1, 41), 2))
    data = OrlFaces().load(tmp_path)
    assert data.inputs.shape == (1, 64, 64)
    assert data.num_classes == 40
    assert OrlFaces(size=None).load(tmp_path).inputs.shape == (1, 112, 92)


@pytest.mark.parametrize("source", [FemnistDigits(), OrlFaces()])
def test_missing_and_ambiguous(tmp_path: Path, source: FemnistDigits | OrlFaces) -> None:
    with pytest.raises(DataError, match=r"expected an \.npz file in"):
        source.load(tmp_path)
    for folder in ("femnist_digits", "orl_faces"):
        for name in ("a.npz", "b.npz"):
            save(tmp_path / folder / name, x=np.zeros(1))
    with pytest.raises(DataError, match=r"expected one \.npz, got a\.npz, b\.npz"):
        source.load(tmp_path)
