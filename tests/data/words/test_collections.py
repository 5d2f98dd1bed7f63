from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.data.trees import write

from leaktight.core.errors import DataError
from leaktight.core.tasks import WordRecognition
from leaktight.data.words.collections import Icdar, Iiit5k, Svt, Synth90k, SynthText
from leaktight.data.words.images import ALPHABET, decode_words, encode_words


def picture(shade: int = 0, size: tuple[int, int] = (20, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade, shade, shade)).save(buffer, "PNG")
    return buffer.getvalue()


def mat(**variables: Any) -> bytes:
    buffer = io.BytesIO()
    scipy.io.savemat(buffer, variables)
    return buffer.getvalue()


@given(st.lists(st.text(ALPHABET, min_size=1, max_size=12), max_size=6))
def test_words_survive_encoding(words: list[str]) -> None:
    encoded = encode_words(words)
    assert encoded.shape == (len(words), max((len(word) for word in words), default=0))
    assert decode_words(encoded) == words
    assert decode_words(encode_words([word.upper() for word in words], 15)) == words


def test_encoding() -> None:
    assert encode_words(["0aZ"], 5).tolist() == [[0, 10, 35, -1, -1]]


@pytest.mark.parametrize(
    ("words", "length", "message"), [(["a-b"], 9, "got 'a-b'"), ([""], 9, "got ''"), (["abc"], 2, "at most 2")]
)
def test_strange_words(words: list[str], length: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode_words(words, length)


TABLE = {f"test/{number}.png": picture(number) for number in range(10)}
LABELS = "".join(f"test/{number}.png,Word{number}\n" for number in range(10)).encode()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("source", "folder"), [(Synth90k(), "mjsynth"), (Iiit5k(), "iiit5k")])
def test_labels_csv(tmp_path: Path, packed: bool, source: Synth90k | Iiit5k, folder: str) -> None:
    write(tmp_path / folder, TABLE | {"labels.csv": LABELS}, packed=packed)
    data = source.load(tmp_path)
    assert data.inputs.shape == (3, 32, 100)
    assert data.train.targets.shape == (8, 24)
    assert len(data.test) == 2
    assert data.task == WordRecognition(blank=36)
    assert data.num_classes == 36
    # The shade of the picture is the number in the word.
    for part in (data.train, data.test):
        assert [f"word{shade}" for shade in part.inputs[:, 0, 0, 0].tolist()] == decode_words(part.targets)


def test_labels_csv_with_parts(tmp_path: Path) -> None:
    files = {"train/a.png": picture(), "test/b.png": picture(), "val/c.png": picture()}
    write(tmp_path / "iiit5k", files | {"labels.csv": b"train/a.png,one\ntest/b.png,two\nval/c.png,three\n"})
    data = Iiit5k().load(tmp_path)
    assert decode_words(data.train.targets) == ["one"]
    assert decode_words(data.test.targets) == ["two"]


def test_other_words_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = LABELS.replace(b"Word3", b"it's").replace(b"Word4", b"x" * 25)
    write(tmp_path / "iiit5k", TABLE | {"labels.csv": labels})
    with caplog.at_level(logging.INFO):
        data = Iiit5k().load(tmp_path)
    assert len(data.train) + len(data.test) == 8
    assert "iiit5k: left out 2 of 10 words" in caplog.text


def test_max_words_and_max_length(tmp_path: Path) -> None:
    write(tmp_path / "iiit5k", TABLE | {"labels.csv": LABELS})
    data = Iiit5k(max_words=5, max_length=6).load(tmp_path)
    assert len(data.train) + len(data.test) == 5
    assert data.train.targets.shape[1] == 6
    with pytest.raises(DataError, match=r"with at most 2 symbols in .*, got none of 10"):
        Iiit5k(max_length=2).load(tmp_path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (b"test/0.png,Word\ntest/1.png\n", r"labels\.csv, line 2: expected file,word, got 'test/1\.png'"),
        (b"test/0.png,a,b\n", r"line 1: expected file,word"),
        (b"test/99.png,Word\n", r"line 1: expected the file test/99\.png, found nothing"),
        (b"", "expected labelled word images"),
    ],
)
def test_strange_csv(tmp_path: Path, labels: bytes, message: str) -> None:
    write(tmp_path / "iiit5k", TABLE | {"labels.csv": labels})
    with pytest.raises(DataError, match=message):
        Iiit5k().load(tmp_path)


def test_unreadable_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = TABLE | {"test/3.png": b"damaged", "labels.csv": LABELS}
    write(tmp_path / "iiit5k", files)
    write(tmp_path / "mjsynth", files)
    with pytest.raises(DataError, match=r"test/3\.png: expected a readable image"):
        Iiit5k().load(tmp_path)
    with caplog.at_level(logging.INFO):
        data = Synth90k().load(tmp_path)
    assert len(data.train) + len(data.test) == 9
    assert "synth90k: left out 1 of 10 images" in caplog.text


@pytest.mark.parametrize("base", ["", "mnt/ramdisk/max/90kDICT32px/"])
def test_synth90k_annotations(tmp_path: Path, base: str) -> None:
    files = {f"{base}1/2/{number}_Word{number}_99.jpg": picture(number) for number in range(4)}
    files |= {
        f"{base}annotation_train.txt": b"./1/2/0_Word0_99.jpg 99\n./1/2/1_Word1_99.jpg 99\n./1/2/2_Word2_99.jpg 99\n",
        f"{base}annotation_test.txt": b"./1/2/3_Word3_99.jpg 99\n",
    }
    write(tmp_path / "mjsynth", files)
    data = Synth90k().load(tmp_path)
    assert decode_words(data.train.targets) == ["word0", "word1", "word2"]
    assert decode_words(data.test.targets) == ["word3"]
    assert len(Synth90k(max_words=2).load(tmp_path).train) == 2


def test_synth90k_by_file_names(tmp_path: Path) -> None:
    write(tmp_path / "synth90k", {f"x/300{number}_7_182_slinking_71711.jpg": picture() for number in range(5)})
    assert decode_words(Synth90k().load(tmp_path).test.targets) == ["slinking"]
    write(tmp_path / "synth90k", {"x/holiday.jpg": picture()})
    with pytest.raises(DataError, match=r"holiday\.jpg: expected a name like 182_slinking_71711\.jpg"):
        Synth90k().load(tmp_path)


def struct(names: list[str], words: list[str]) -> np.ndarray:
    rows = np.zeros((1, len(names)), dtype=[("ImgName", object), ("GroundTruth", object)])
    for place, (name, word) in enumerate(zip(names, words, strict=True)):
        rows[0, place] = (name, word)
    return rows


def test_iiit5k_mat(tmp_path: Path) -> None:
    files = {
        "IIIT5K/traindata.mat": mat(traindata=struct(["train/1.png", "train/2.png"], ["FAT", "cat"])),
        "IIIT5K/testdata.mat": mat(testdata=struct(["test/1.png"], ["HAT"])),
        "IIIT5K/train/1.png": picture(1),
        "IIIT5K/train/2.png": picture(2),
        "IIIT5K/test/1.png": picture(3),
    }
    write(tmp_path / "iiit5k", files)
    data = Iiit5k().load(tmp_path)
    assert decode_words(data.train.targets) == ["fat", "cat"]
    assert data.train.inputs[:, 0, 0, 0].tolist() == [1, 2]
    assert decode_words(data.test.targets) == ["hat"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nonsense", r"traindata\.mat: expected a readable MATLAB file"),
        (mat(other=np.zeros(2)), "expected the variable 'traindata'"),
        (mat(traindata=np.zeros(2)), "expected the fields ImgName and GroundTruth"),
    ],
)
def test_strange_mat(tmp_path: Path, content: bytes, message: str) -> None:
    write(tmp_path / "iiit5k", {"traindata.mat": content})
    with pytest.raises(DataError, match=message):
        Iiit5k().load(tmp_path)


def test_iiit5k_without_tables(tmp_path: Path) -> None:
    write(tmp_path / "iiit5k", {"train/1.png": picture()})
    with pytest.raises(DataError, match=r"expected traindata\.mat or labels\.csv, found neither"):
        Iiit5k().load(tmp_path)


def scene() -> bytes:
    """Black with a white rectangle from (10, 4) to (30, 12)."""
    pixels = np.zeros((20, 40, 3), dtype=np.uint8)
    pixels[4:12, 10:30] = 255
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def tagset(rectangle: str) -> bytes:
    return (
        "<?xml version='1.0' encoding='utf-8'?><tagset><image><imageName>img/1.png</imageName><lex>A,B</lex>"
        f"<taggedRectangles>{rectangle}</taggedRectangles></image></tagset>"
    ).encode()


GOOD = '<taggedRectangle height="8" width="20" x="10" y="4"><tag>LIVING</tag></taggedRectangle>'


def test_svt_cuts_rectangles(tmp_path: Path) -> None:
    beyond = '<taggedRectangle height="99" width="99" x="-5" y="-5"><tag>ROOM</tag></taggedRectangle>'
    write(
        tmp_path / "svt",
        {"svt1/train.xml": tagset(GOOD + beyond), "svt1/test.xml": tagset(GOOD), "svt1/img/1.png": scene()},
    )
    data = Svt().load(tmp_path)
    assert decode_words(data.train.targets) == ["living", "room"]
    assert data.train.inputs[0].eq(255).all()
    assert data.train.inputs[1].eq(0).any()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (b"<tagset>", r"train\.xml: expected XML with tagged rectangles"),
        (tagset('<taggedRectangle height="8" x="10" y="4"><tag>A</tag></taggedRectangle>'), "expected XML with tagged"),
        (tagset(GOOD.replace('x="10"', 'x="here"')), "expected XML with tagged"),
        (tagset(GOOD.replace('x="10"', 'x="100"')), r"img/1\.png: expected a box inside the image for 'LIVING'"),
    ],
)
def test_strange_svt(tmp_path: Path, train: bytes, message: str) -> None:
    write(tmp_path / "svt", {"train.xml": train, "test.xml": tagset(GOOD), "img/1.png": scene()})
    with pytest.raises(DataError, match=message):
        Svt().load(tmp_path)


def test_svt_without_table(tmp_path: Path) -> None:
    write(tmp_path / "svt", {"train.xml": tagset(GOOD), "img/1.png": scene()})
    with pytest.raises(DataError, match=r"expected test\.xml, found nothing"):
        Svt().load(tmp_path)


ICDAR_TRAIN = (
    '\ufeffword_1.png, "Genaxis"\r\nword_2.png, "[06]"\r\nword_3.png, "a, b"\r\nword_4.png, "TWO"\r\n'.encode()
)
ICDAR_IMAGES = {f"ch4_training_word_images_gt/word_{number}.png": picture(number) for number in (1, 2, 3, 4)}


@pytest.mark.parametrize("table", ["ch4_test_word_images_gt/gt.txt", "Challenge4_Test_Task3_GT.txt"])
def test_icdar(tmp_path: Path, table: str) -> None:
    files = {
        "ch4_training_word_images_gt/gt.txt": ICDAR_TRAIN,
        "ch4_test_word_images_gt/word_1.png": picture(77),
        table: b'word_1.png, "JOINT"\n',
    }
    write(tmp_path / "icdar2015", files | ICDAR_IMAGES)
    data = Icdar().load(tmp_path)
    assert decode_words(data.train.targets) == ["genaxis", "two"]
    assert data.train.inputs[:, 0, 0, 0].tolist() == [1, 4]
    assert decode_words(data.test.targets) == ["joint"]
    assert data.test.inputs.eq(77).all()


def test_icdar_training_alone_is_split(tmp_path: Path) -> None:
    write(tmp_path / "icdar2015", ICDAR_IMAGES | {"ch4_training_word_images_gt/gt.txt": ICDAR_TRAIN})
    data = Icdar().load(tmp_path)
    assert (len(data.train), len(data.test)) == (1, 1)


def test_strange_icdar(tmp_path: Path) -> None:
    write(tmp_path / "icdar2015", ICDAR_IMAGES)
    with pytest.raises(DataError, match=r"expected gt\.txt beside the training words"):
        Icdar().load(tmp_path)
    write(tmp_path / "icdar2015", {"ch4_training_word_images_gt/gt.txt": b'word_1.png, "A"\nword_2.png A\n'})
    with pytest.raises(DataError, match=r'gt\.txt, line 2: expected file, "word", got'):
        Icdar().load(tmp_path)


def cells(items: list[Any]) -> np.ndarray:
    row = np.empty((1, len(items)), dtype=object)
    for place, item in enumerate(items):
        row[0, place] = item
    return row


CORNERS = np.array([[10.0, 30.0, 30.0, 10.0], [4.0, 4.0, 12.0, 12.0]])  # the white rectangle of `scene`


def synthtext(texts: list[np.ndarray]) -> bytes:
    boxes = [np.stack([CORNERS, CORNERS - 3, CORNERS], axis=2), CORNERS]
    return mat(imnames=cells(["8/a.png", "8/b.png"]), wordBB=cells(boxes), txt=cells(texts))


@pytest.mark.parametrize("base", ["", "SynthText/"])
def test_synthtext(tmp_path: Path, base: str) -> None:
    table = synthtext([np.array(["One two  ", "Three    "]), np.array(["single"])])
    write(tmp_path / "synthtext", {f"{base}gt.mat": table, f"{base}8/a.png": scene(), f"{base}8/b.png": scene()})
    data = SynthText(test_share=0.25).load(tmp_path)
    words = dict(zip(decode_words(data.train.targets) + decode_words(data.test.targets), range(4), strict=True))
    assert set(words) == {"one", "two", "three", "single"}
    images = torch.cat([data.train.inputs, data.test.inputs])
    assert images[words["one"]].eq(255).all()
    assert images[words["single"]].eq(255).all()
    assert images[words["two"]].eq(0).any()
    few = SynthText(max_words=2).load(tmp_path)
    assert len(few.train) + len(few.test) == 2


def test_strange_synthtext(tmp_path: Path) -> None:
    table = synthtext([np.array(["One two"]), np.array(["single"])])
    write(tmp_path / "synthtext", {"gt.mat": table, "8/a.png": scene(), "8/b.png": scene()})
    with pytest.raises(DataError, match=r"gt\.mat: expected one box per word of 8/a\.png, got 3 for 2 words"):
        SynthText().load(tmp_path)
    (tmp_path / "synthtext" / "gt.mat").unlink()
    with pytest.raises(DataError, match=r"expected gt\.mat, found nothing"):
        SynthText().load(tmp_path)


@pytest.mark.parametrize("source", [Synth90k(), SynthText(), Iiit5k(), Svt(), Icdar()])
def test_missing(tmp_path: Path, source: Synth90k | SynthText | Iiit5k | Svt | Icdar) -> None:
    with pytest.raises(DataError, match=r"found nothing; fetch it with `leaktight data \w+`"):
        source.load(tmp_path)
