from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image
from tests.data.trees import write

from leaktight.core.errors import DataError
from leaktight.data.folders import ImageFolder, Imagenet, Lfw, TinyImagenet, VggFace


def picture(shade: int = 0, *, mode: str = "RGB", size: tuple[int, int] = (6, 5), kind: str = "PNG") -> bytes:
    colour = (shade, 0, 255) if mode == "RGB" else shade
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, kind)
    return buffer.getvalue()


def classes(*names: str, count: int = 5, before: str = "", after: str = "") -> dict[str, bytes]:
    return {
        f"{before}{name}/{after}{number}.png": picture(10 * place + number)
        for place, name in enumerate(names)
        for number in range(count)
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("before", ["", "outer/", "outer/inner/"])
def test_class_folders_are_split(tmp_path: Path, packed: bool, before: str) -> None:
    folder = write(tmp_path / "mine", classes("dog", "cat", before=before), packed=packed)
    data = ImageFolder(path=str(folder / "pack.zip" if packed else folder), size=4).load(tmp_path)
    assert data.class_names == ("cat", "dog")
    assert data.inputs.shape == (3, 4, 4)
    assert (len(data.train), len(data.test)) == (8, 2)
    assert data.test.targets.tolist() == [0, 1]
    # The red channel tells which picture it is: dog was written first.
    shades = data.train.inputs[:, 0, 0, 0]
    assert bool(((shades < 10) == (data.train.targets == 1)).all())


@pytest.mark.parametrize("folder", ["test", "val", "validation"])
def test_train_and_test_folders(tmp_path: Path, folder: str) -> None:
    files = classes("a", "b", before="x/train/") | classes("b", count=2, before=f"x/{folder}/")
    write(tmp_path / "mine", files)
    data = ImageFolder(path="mine").load(tmp_path)
    assert (len(data.train), data.test.targets.tolist()) == (10, [1, 1])


def test_train_folder_alone_is_split(tmp_path: Path) -> None:
    write(tmp_path / "mine", classes("a", "b", before="train/"))
    data = ImageFolder(path="mine").load(tmp_path)
    assert data.class_names == ("a", "b")
    assert len(data.test) == 2


def test_grey_among_colour_and_other_files(tmp_path: Path) -> None:
    files = classes("a", "b") | {"a/grey.png": picture(99, mode="L"), "a/notes.txt": b"hello", "README": b""}
    write(tmp_path / "mine", files)
    data = ImageFolder(path="mine").load(tmp_path)
    assert data.inputs.shape == (3, 64, 64)
    assert len(data.train) + len(data.test) == 11
    assert ImageFolder(path="mine", channels=1).load(tmp_path).inputs.shape == (1, 64, 64)


def test_limits(tmp_path: Path) -> None:
    write(tmp_path / "mine", classes("a", "b", "c"))
    data = ImageFolder(path="mine", max_classes=2, max_per_class=3).load(tmp_path)
    assert data.class_names == ("a", "b")
    assert len(data.train) + len(data.test) == 6
    with pytest.raises(DataError, match="set max_classes, max_per_class or a smaller size"):
        ImageFolder(path="mine", max_gigabytes=1e-6).load(tmp_path)


def test_test_classes_must_be_known(tmp_path: Path) -> None:
    write(tmp_path / "mine", classes("a", before="train/") | classes("b", before="test/"))
    with pytest.raises(DataError, match="expected test classes among the 1 training classes, got 'b'"):
        ImageFolder(path="mine").load(tmp_path)


def test_loose_test_images(tmp_path: Path) -> None:
    write(tmp_path / "mine", classes("a", before="train/") | {"val/1.png": picture()})
    with pytest.raises(DataError, match="expected class folders in val, got loose images"):
        ImageFolder(path="mine").load(tmp_path)


def test_unreadable_members_are_named(tmp_path: Path) -> None:
    write(tmp_path / "mine", classes("a", "b") | {"a/bad.jpg": b"oops"}, packed=True)
    with pytest.raises(DataError, match=r"pack\.zip/a/bad\.jpg: expected a readable image"):
        ImageFolder(path="mine/pack.zip").load(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="expected image files in class folders"):
        ImageFolder(path="mine").load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "expected size >= 1, got 0"),
        ({"channels": 2}, "expected channels 1"),
        ({"max_classes": 0}, "expected max_classes >= 1"),
        ({"max_gigabytes": 0.0}, "expected max_gigabytes > 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageFolder(path="x", **settings)


TINY = classes("n01", "n02", before="tiny-imagenet-200/train/", after="images/")
VAL = {f"tiny-imagenet-200/val/images/val_{number}.JPEG": picture(kind="JPEG") for number in range(3)}
ANNOTATIONS = "tiny-imagenet-200/val/val_annotations.txt"


@pytest.mark.parametrize("packed", [False, True])
def test_tiny_imagenet(tmp_path: Path, packed: bool) -> None:
    table = b"val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\nval_2.JPEG\tn02\t0\t0\t9\t9\n"
    write(tmp_path / "tiny_imagenet", TINY | VAL | {ANNOTATIONS: table}, packed=packed)
    data = TinyImagenet().load(tmp_path)
    assert data.class_names == ("n01", "n02")
    assert (len(data.train), data.test.targets.tolist()) == (10, [0, 1, 1])
    assert data.inputs.shape == (3, 64, 64)


def test_tiny_imagenet_without_validation_images_is_split(tmp_path: Path) -> None:
    write(tmp_path / "tiny_imagenet", TINY | {ANNOTATIONS: b"val_0.JPEG\tn02\t0\t0\t9\t9\n"})
    data = TinyImagenet().load(tmp_path)
    assert (len(data.train), len(data.test)) == (8, 2)


def test_tiny_imagenet_with_validation_images_in_class_folders(tmp_path: Path) -> None:
    write(tmp_path / "tiny_imagenet", TINY | classes("n02", count=2, before="tiny-imagenet-200/val/", after="images/"))
    assert TinyImagenet().load(tmp_path).test.targets.tolist() == [1, 1]


def test_tiny_imagenet_with_a_strange_table(tmp_path: Path) -> None:
    write(tmp_path / "tiny_imagenet", TINY | VAL | {ANNOTATIONS: b"val_0.JPEG\tn02\nval_1.JPEG n01\n"})
    with pytest.raises(DataError, match=r"val_annotations\.txt, line 2: expected file and class with a tab"):
        TinyImagenet().load(tmp_path)


def test_imagenet_samples_keep_their_numbers(tmp_path: Path) -> None:
    files = {
        f"{number:03}_n0144{number:04}_name_{number}.JPEG": picture(kind="JPEG") for number in (0, 14, 980, 994, 999)
    }
    write(tmp_path / "imagenet_samples", files, packed=True)
    data = Imagenet(size=8).load(tmp_path)
    assert sorted(data.train.targets.tolist() + data.test.targets.tolist()) == [0, 14, 980, 994, 999]
    assert (data.num_classes, data.class_names[14], data.class_names[15]) == (1000, "name_14", "class 15")
    compact = Imagenet(size=8, compact=True).load(tmp_path)
    assert sorted(compact.train.targets.tolist() + compact.test.targets.tolist()) == [0, 1, 2, 3, 4]


def test_imagenet_tree(tmp_path: Path) -> None:
    write(tmp_path / "imagenet", classes("n01", "n02", before="train/") | classes("n02", count=1, before="val/"))
    with pytest.raises(DataError, match=r"expected 1000 class folders .* got 2; set compact = true"):
        Imagenet(size=8).load(tmp_path)
    data = Imagenet(size=8, compact=True).load(tmp_path)
    assert (len(data.train), data.test.targets.tolist()) == (10, [1])


def test_whole_imagenet_tree_keeps_its_numbers(tmp_path: Path) -> None:
    one = picture(size=(1, 1))
    names = [f"n{number:08}" for number in range(1000)]
    write(
        tmp_path / "imagenet", {f"{part}/{name}/1.png": one for name in names for part in ("train", "val")}, packed=True
    )
    data = Imagenet(size=1, max_classes=3).load(tmp_path)
    assert (data.num_classes, data.train.targets.tolist()) == (1000, [0, 1, 2])


def test_lfw(tmp_path: Path) -> None:
    files = classes("Ann_A", "Bob_B", before="lfw/", count=4) | classes("Once_Only", before="lfw/", count=1)
    write(tmp_path / "lfw", files, packed=True)
    data = Lfw(size=8).load(tmp_path)
    assert data.class_names == ("Ann_A", "Bob_B")
    assert Lfw(size=8, min_per_person=1).load(tmp_path).num_classes == 3
    with pytest.raises(DataError, match="at least 9 pictures, got at most 4; lower min_per_person"):
        Lfw(min_per_person=9).load(tmp_path)


def test_vgg_face_splits_the_training_people(tmp_path: Path) -> None:
    write(tmp_path / "vgg_face", classes("n1", "n2", before="train/") | classes("n3", before="test/"))
    data = VggFace(size=8).load(tmp_path)
    assert data.class_names == ("n1", "n2")
    assert (len(data.train), len(data.test)) == (8, 2)


@pytest.mark.parametrize("source", [TinyImagenet(), Imagenet(), Lfw(), VggFace()])
def test_missing(tmp_path: Path, source: TinyImagenet | Imagenet | Lfw | VggFace) -> None:
    with pytest.raises(DataError, match=r"found nothing; fetch it with `leaktight data \w+`"):
        source.load(tmp_path / "nowhere")
