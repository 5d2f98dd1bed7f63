"""What data sets of word images share: encoding of words, reading of images."""

from __future__ import annotations

import csv
import io
import logging
import string
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.rng import Rng
from leaktight.core.tasks import WordRecognition
from leaktight.core.text import as_written, printable
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.files import Tree, open_tree
from leaktight.data.images import decode_image, stretch_image
from leaktight.data.settings import SplitSettings, check_minimum

log = logging.getLogger(__name__)

ALPHABET = string.digits + string.ascii_lowercase
_NUMBERS = {symbol: number for number, symbol in enumerate(ALPHABET)}


def is_readable(word: str) -> bool:
    """Whether a word has letters and digits of the alphabet only, whatever their case."""
    return bool(word) and all(symbol in _NUMBERS for symbol in word.lower())


def encode_words(words: Sequence[str], length: int | None = None) -> Tensor:
    """Words as symbol numbers (N, L), padded with -1; `length` is L, or the longest word decides.

    >>> encode_words(["A1", "b"])
    tensor([[10,  1],
            [11, -1]])
    """
    unreadable = next((word for word in words if not is_readable(word)), None)
    if unreadable is not None:
        raise DataError(f"expected words of the letters a-z and the digits 0-9, got {unreadable!r}; leave it out")
    longest = max((len(word) for word in words), default=0)
    if length is not None and longest > length:
        raise DataError(f"expected words of at most {length} symbols, got one of {longest}; raise max_length")
    encoded = torch.full((len(words), longest if length is None else length), -1)
    for place, word in enumerate(words):
        encoded[place, : len(word)] = torch.tensor([_NUMBERS[symbol] for symbol in word.lower()])
    return encoded


def decode_words(encoded: Tensor) -> list[str]:
    """The inverse of `encode_words`, in lower case: (N, L) to N words.

    >>> decode_words(encode_words(["A1", "b"]))
    ['a1', 'b']
    """
    return ["".join(ALPHABET[number] for number in row if number >= 0) for row in encoded.tolist()]


class WordImage(NamedTuple):
    """A word and its image: a file, and (left, top, right, bottom) where the word is a part of that image."""

    name: str
    word: str
    box: tuple[int, int, int, int] | None = None


WordLists = tuple[Sequence[WordImage], Sequence[WordImage] | None]
"""Training and test words; None for the test words if the first list has to be split."""


@dataclass(frozen=True, kw_only=True)
class WordSettings(SplitSettings, ABC):
    """A data set of word images: RGB, stretched to `height` x `width`; words of 0-9a-z in any case.

    height, width: in pixels. skip_unreadable: leave out damaged images instead of an error.
    max_words: the most words per part, drawn with `split_seed`; None takes all. max_length: the width L of the targets.
    Longer words, words with other symbols and (with `skip_unreadable`) damaged images are left out; the log counts
    them.
    """

    height: int = 32
    width: int = 100
    max_words: int | None = 20_000
    max_length: int = 24
    skip_unreadable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, 1, "height", "width", "max_words", "max_length")

    @abstractmethod
    def lists(self, tree: Tree) -> WordLists:
        """The training and test words in `tree`."""

    def drawn(self, count: int, part: str) -> list[int]:
        """Sorted indices of at most `max_words` of the `count` words of a part."""
        if self.max_words is None or count <= self.max_words:
            return list(range(count))
        order = Rng(self.split_seed).child("words", part).public_numpy().permutation(count)
        return sorted(order[: self.max_words].tolist())

    def read_words(self, name: str, source: Path) -> Dataset:
        with open_tree(source) as tree:
            train_list, test_list = self.lists(tree)
            if not train_list:
                raise DataError(f"{name}: expected labelled word images in {source}, found none; check it")
            train = self._read(name, tree, train_list, "train")
            if test_list is not None:
                test = self._read(name, tree, test_list, "test")
            else:
                # Nothing to stratify by: most words occur once.
                kept, held = self.cut(torch.zeros(len(train), dtype=torch.int64))
                train, test = train.take(kept), train.take(held)
        return Dataset(name, train, test, tuple(ALPHABET), WordRecognition(blank=len(ALPHABET)))

    def _read(self, name: str, tree: Tree, listed: Sequence[WordImage], part: str) -> Examples:
        usable = [item for item in listed if is_readable(item.word) and len(item.word) <= self.max_length]
        if len(usable) < len(listed):
            log.info("%s: left out %d of %d words (%s)", name, len(listed) - len(usable), len(listed), part)
        images, words = self._images(name, tree, [usable[place] for place in self.drawn(len(usable), part)])
        if not words:
            raise DataError(
                f"{name}: expected {part} words of 0-9a-z with at most {self.max_length} symbols in {tree.source}, got "
                f"none of {len(listed)}; check the labels"
            )
        return Examples(torch.stack(images), encode_words(words, self.max_length))

    def _images(self, name: str, tree: Tree, items: Sequence[WordImage]) -> tuple[list[Tensor], list[str]]:
        images, words = [], []
        opened = ""
        for item in items:
            try:
                if item.name != opened:  # the words of one photograph follow each other: decode it once
                    picture = decode_image(tree.read(item.name), tree.where(item.name))
                    opened = item.name
                cut = _cropped(picture, item, tree)
            except DataError:
                if not self.skip_unreadable:
                    raise
                continue
            images.append(stretch_image(cut, self.height, self.width))
            words.append(item.word)
        if len(words) < len(items):
            log.info("%s: left out %d of %d images that cannot be read", name, len(items) - len(words), len(items))
        return images, words


def _cropped(picture: Image.Image, item: WordImage, tree: Tree) -> Image.Image:
    if item.box is None:
        return picture
    left, top, right, bottom = item.box
    box = (max(left, 0), max(top, 0), min(right, picture.width), min(bottom, picture.height))
    if box[2] - box[0] < 2 or box[3] - box[1] < 2:
        got = as_written(item.box)
        raise DataError(f"{tree.where(item.name)}: expected a box inside the image for {item.word!r}, got {got}")
    return picture.crop(box)


def find_member(tree: Tree, *names: str) -> str | None:
    """The first file of the tree with one of these names, in any folder."""
    return next((name for wanted in names for name in tree.names if PurePosixPath(name).name == wanted), None)


def _rows(tree: Tree, table: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(tree.text(table)))
    except csv.Error as error:
        raise DataError(f"{tree.where(table)}: expected lines of file,word, got {error}; correct the table") from None


def table_lists(tree: Tree, table: str) -> WordLists:
    """The words of a CSV of file,word: by train/ and test/ folder where both exist, else as one list."""
    base = PurePosixPath(table).parent
    present = set(tree.names)
    items = []
    for number, row in enumerate(_rows(tree, table), start=1):
        if len(row) != 2:
            got = printable(",".join(row))
            raise DataError(f"{tree.where(table)}, line {number}: expected file,word, got {got!r}; correct the line")
        file = str(base / row[0])
        if file not in present:
            raise DataError(
                f"{tree.where(table)}, line {number}: expected the file {printable(file)}, found nothing; fetch it"
            )
        items.append(WordImage(file, row[1]))
    parts = {
        part: [item for item in items if part in PurePosixPath(item.name).parts[:-1]] for part in ("train", "test")
    }
    return (parts["train"], parts["test"]) if all(parts.values()) else (items, None)
