"""Published data sets of word images: 0-9a-z, 32x100 RGB, targets (N, L) padded with -1."""

from __future__ import annotations

import io
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import numpy as np
import scipy.io

from leaktight.core.errors import DataError
from leaktight.core.reading import most_unpacked, size_words
from leaktight.core.rng import Rng
from leaktight.core.text import printable
from leaktight.data.dataset import Dataset
from leaktight.data.files import Tree, find_source
from leaktight.data.images import is_image
from leaktight.data.words.images import WordImage, WordLists, WordSettings, find_member, table_lists

_TABLE = "labels.csv"
_MAT_HEADER, _MAT_PACKED = 128, 15
_SYNTH90K_NAME = re.compile(r"(?:.*_)?(?P<word>[^_]+)_\d+\.[^.]+$")
_SYNTH90K_FOLDERS = ("", "90kDICT32px/", "mnt/ramdisk/max/90kDICT32px/")
_ICDAR_LINE = re.compile(r'(?P<file>[^,]+),\s*"(?P<word>.*)"\s*$')
_ICDAR_TABLES = frozenset({"gt.txt", "Challenge4_Training_Task3_GT.txt", "Challenge4_Test_Task3_GT.txt"})

_MAT_ERRORS = (
    *(OSError, EOFError, ValueError, TypeError, LookupError, NotImplementedError, MemoryError),
    *(zlib.error, scipy.io.matlab.MatReadError),
)


def _load_mat(content: Path | io.BytesIO, source: str, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """The named variables of a MATLAB file."""
    try:
        _check_packed(content)
        found = scipy.io.loadmat(content, variable_names=list(keys))
    except _MAT_ERRORS as error:
        raise DataError(f"{source}: expected a readable MATLAB file, got {error}; fetch it again") from None
    absent = [key for key in keys if key not in found]
    if absent:
        raise DataError(f"{source}: expected the variable {absent[0]!r}, found nothing; fetch it again")
    return {key: found[key] for key in keys}


def _check_packed(content: Path | io.BytesIO) -> None:
    """Raise ValueError if the packed variables of a MATLAB 5 file unpack to more than a file of its size may hold."""
    with content.open("rb") if isinstance(content, Path) else nullcontext(content) as file:
        size = file.seek(0, os.SEEK_END)
        left, place = most_unpacked(size), _MAT_HEADER
        while place + 8 <= size:
            file.seek(place)
            kind, length = struct.unpack("<II", file.read(8))
            place += 8 + length
            packed = zlib.decompressobj() if kind == _MAT_PACKED else None
            while packed is not None and not packed.eof and file.tell() < min(place, size):
                chunk = packed.unconsumed_tail or file.read(min(2**16, place - file.tell()))
                left -= len(packed.decompress(chunk, 2**20))
                while packed.unconsumed_tail and left >= 0:
                    left -= len(packed.decompress(packed.unconsumed_tail, 2**20))
                if left < 0:
                    raise ValueError(f"more than {size_words(most_unpacked(size))} in a file of its size")
        file.seek(0)


def _string(value: np.ndarray) -> str:
    """MATLAB text, which comes as an array of one string."""
    return "".join(str(item) for item in np.ravel(value)[:1])


@dataclass(frozen=True, kw_only=True)
class Synth90k(WordSettings):
    """Synth90k (MJSynth): 9 million rendered words, 32x100 colour.

    Reads the files that annotation_train.txt and annotation_test.txt list, or a zip with labels.csv. Damaged images,
    of which the original has some, are skipped.
    """

    skip_unreadable: bool = True

    def load(self, root: Path) -> Dataset:
        expected = f"annotation_train.txt and annotation_test.txt, or a zip with {_TABLE}"
        return self.read_words("synth90k", find_source(root, "synth90k", ("synth90k", "mjsynth"), expected))

    def lists(self, tree: Tree) -> WordLists:
        if tree.has(_TABLE):
            return table_lists(tree, _TABLE)
        # Listing 9 million files takes long, so read the annotations where they are present.
        for base in _SYNTH90K_FOLDERS:
            if tree.has(f"{base}annotation_train.txt") and tree.has(f"{base}annotation_test.txt"):
                return self._annotated(tree, base, "train"), self._annotated(tree, base, "test")
        return [_named(tree, name) for name in tree.names if is_image(name)], None

    def _annotated(self, tree: Tree, base: str, part: str) -> list[WordImage]:
        lines = tree.text(f"{base}annotation_{part}.txt").splitlines()
        chosen = (lines[place].split() for place in self.drawn(len(lines), f"{part} lines"))
        return [_named(tree, str(PurePosixPath(base) / fields[0])) for fields in chosen if fields]


def _named(tree: Tree, name: str) -> WordImage:
    match = _SYNTH90K_NAME.match(PurePosixPath(name).name)
    if match is None:
        raise DataError(
            f"{tree.where(name)}: expected a name like 182_slinking_71711.jpg, got another; rename the file"
        )
    return WordImage(name, match["word"])


@dataclass(frozen=True, kw_only=True)
class Iiit5k(WordSettings):
    """IIIT 5K-Words: 5000 words from signs and posters, scaled to 32x100 colour.

    Reads the files that traindata.mat and testdata.mat list, or a zip with labels.csv.
    """

    def load(self, root: Path) -> Dataset:
        expected = f"traindata.mat and testdata.mat, or a zip with {_TABLE}"
        return self.read_words("iiit5k", find_source(root, "iiit5k", ("iiit5k", "IIIT5K"), expected))

    def lists(self, tree: Tree) -> WordLists:
        if table := find_member(tree, _TABLE):
            return table_lists(tree, table)
        lists = [self._from_mat(tree, f"{part}data") for part in ("train", "test")]
        return lists[0], lists[1]

    def _from_mat(self, tree: Tree, variable: str) -> list[WordImage]:
        table = find_member(tree, f"{variable}.mat")
        if table is None:
            raise DataError(f"{tree.source}: expected {variable}.mat or {_TABLE}, found neither; fetch it again")
        rows = _load_mat(io.BytesIO(tree.read(table)), tree.where(table), [variable])[variable].ravel()
        if rows.dtype.names is None or not {"ImgName", "GroundTruth"} <= set(rows.dtype.names):
            raise DataError(f"{tree.where(table)}: expected the fields ImgName and GroundTruth, got {rows.dtype.names}")
        base = PurePosixPath(table).parent
        return [WordImage(str(base / _string(row["ImgName"])), _string(row["GroundTruth"])) for row in rows]


@dataclass(frozen=True, kw_only=True)
class Svt(WordSettings):
    """Street View Text: words on shop fronts, cut out of photographs by train.xml and test.xml, scaled to 32x100."""

    def load(self, root: Path) -> Dataset:
        return self.read_words("svt", find_source(root, "svt", ("svt", "svt1"), "train.xml, test.xml and img/*.jpg"))

    def lists(self, tree: Tree) -> WordLists:
        return self._tagged(tree, "train.xml"), self._tagged(tree, "test.xml")

    def _tagged(self, tree: Tree, file: str) -> list[WordImage]:
        table = find_member(tree, file)
        if table is None:
            raise DataError(f"{tree.source}: expected {file}, found nothing; fetch it with `leaktight data svt`")
        base = PurePosixPath(table).parent
        content = tree.read(table)
        if b"<!ENTITY" in content:
            raise DataError(f"{tree.where(table)}: expected XML without entities, got some; do not trust this file")
        try:
            images = ElementTree.fromstring(content).findall("image")
            return [
                WordImage(
                    str(base / (image.findtext("imageName") or "")), rectangle.findtext("tag") or "", _box(rectangle)
                )
                for image in images
                for rectangle in image.iter("taggedRectangle")
            ]
        except (ElementTree.ParseError, KeyError, ValueError, OverflowError, RecursionError) as error:
            raise DataError(
                f"{tree.where(table)}: expected XML with tagged rectangles, got {printable(error)}; fetch it again"
            ) from None


def _box(rectangle: ElementTree.Element) -> tuple[int, int, int, int]:
    left, top, width, height = (int(float(rectangle.attrib[name])) for name in ("x", "y", "width", "height"))
    return left, top, left + width, top + height


@dataclass(frozen=True, kw_only=True)
class Icdar(WordSettings):
    """ICDAR 2015 incidental scene text: cut-out words (word_*.png with gt.txt), scaled to 32x100 colour."""

    def load(self, root: Path) -> Dataset:
        expected = "word_*.png with gt.txt for training and Challenge4_Test_Task3_GT.txt for testing"
        return self.read_words("icdar2015", find_source(root, "icdar2015", ("icdar2015", "icdar"), expected))

    def lists(self, tree: Tree) -> WordLists:
        tables = [name for name in tree.names if PurePosixPath(name).name in _ICDAR_TABLES]
        tests = [name for name in tables if "test" in name.lower()]
        trains = [name for name in tables if name not in tests]
        if not trains:
            raise DataError(f"{tree.source}: expected gt.txt beside the training words, found nothing; check it")
        return self._from_table(tree, trains[0]), self._from_table(tree, tests[0]) if tests else None

    def _from_table(self, tree: Tree, table: str) -> list[WordImage]:
        folder = _folder_of_words(tree, table)
        items = []
        for number, line in enumerate(tree.text(table).splitlines(), start=1):
            match = _ICDAR_LINE.match(line)
            if match is None and line.strip():
                raise DataError(
                    f'{tree.where(table)}, line {number}: expected file, "word", got {line!r}; correct the line'
                )
            if match is not None:
                items.append(WordImage(str(folder / match["file"].strip()), match["word"]))
        return items


def _folder_of_words(tree: Tree, table: str) -> PurePosixPath:
    """Where the words of a table are: beside it, or in the folder whose name says test or train as the table does."""
    base = PurePosixPath(table).parent
    part = "test" if "test" in table.lower() else "train"
    folders = {PurePosixPath(name).parent for name in tree.names if is_image(name)}
    if base in folders:
        return base
    return next((folder for folder in sorted(folders) if part in folder.name.lower()), base)


@dataclass(frozen=True, kw_only=True)
class SynthText(WordSettings):
    """SynthText in the Wild: 7 million words rendered into photographs, cut out by gt.mat, scaled to 32x100 colour.

    Photographs are visited in an order drawn by `split_seed` until `max_words` are found; the words are then split.
    Differs from the paper: a word in perspective is cut out by the upright box around its four corners.
    """

    skip_unreadable: bool = True

    def load(self, root: Path) -> Dataset:
        source = find_source(root, "synthtext", ("synthtext", "SynthText"), "gt.mat and the folders of images")
        return self.read_words("synthtext", source)

    def lists(self, tree: Tree) -> WordLists:
        table = next((name for name in ("gt.mat", "SynthText/gt.mat") if tree.has(name)), None)
        if table is None:
            raise DataError(f"{tree.source}: expected gt.mat, found nothing; fetch it with `leaktight data synthtext`")
        content = tree.source / table if tree.source.is_dir() else io.BytesIO(tree.read(table))
        found = _load_mat(content, tree.where(table), ("imnames", "wordBB", "txt"))
        names, boxes, texts = (found[key].ravel() for key in ("imnames", "wordBB", "txt"))
        items: list[WordImage] = []
        for place in Rng(self.split_seed).child("photographs").public_numpy().permutation(len(names)):
            name = str(PurePosixPath(table).parent / _string(names[place]))
            items.extend(_words_of(tree.where(table), name, boxes[place], texts[place]))
            if self.max_words is not None and len(items) >= self.max_words:
                break
        return items, None


def _words_of(source: str, name: str, boxes: np.ndarray, texts: np.ndarray) -> Iterator[WordImage]:
    """The words of one photograph: boxes (2, 4, words), or (2, 4) of a single word; lines of text."""
    words = " ".join(str(line) for line in texts.ravel()).split()
    corners = boxes.reshape(2, 4, -1)
    if corners.shape[2] != len(words):
        raise DataError(f"{source}: expected one box per word of {name}, got {corners.shape[2]} for {len(words)} words")
    low, high = np.floor(corners.min(1)).astype(int), np.ceil(corners.max(1)).astype(int)
    for place, word in enumerate(words):
        box = (int(low[0, place]), int(low[1, place]), int(high[0, place]), int(high[1, place]))
        yield WordImage(name, word, box)
