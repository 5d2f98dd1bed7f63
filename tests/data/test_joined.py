from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from leaktight.core.errors import DataError
from leaktight.core.tasks import WordRecognition
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.joined import Joined
from leaktight.data.words.images import ALPHABET, decode_words, encode_words


@dataclass(frozen=True)
class Plain:
    name: str
    shape: tuple[int, int, int] = (1, 8, 8)
    labels: tuple[int, ...] = (0, 1, 1)
    num_classes: int = 2

    def load(self, root: Path) -> Dataset:
        images = torch.full((len(self.labels), *self.shape), 9, dtype=torch.uint8)
        examples = Examples(images, torch.tensor(self.labels))
        return Dataset(self.name, examples, examples, tuple("abcdef"[: self.num_classes]))


@dataclass(frozen=True)
class Words:
    words: tuple[str, ...]

    def load(self, root: Path) -> Dataset:
        examples = Examples(torch.zeros(len(self.words), 3, 4, 8, dtype=torch.uint8), encode_words(self.words))
        return Dataset("words", examples, examples, tuple(ALPHABET), WordRecognition())


def test_shared_labels() -> None:
    data = Joined(parts=(Plain("one"), Plain("two", labels=(1,)))).load(Path())
    assert data.name == "one+two"
    assert data.train.targets.tolist() == [0, 1, 1, 1]
    assert data.class_names == ("a", "b")
    assert data.groups is not None
    assert data.groups.tolist() == [0, 0, 0, 1]
    assert data.group_names == ("one", "two")


def test_labels_of_their_own() -> None:
    parts = (Plain("one"), Plain("two", labels=(0, 2), num_classes=3), Plain("three", labels=(1,)))
    data = Joined(parts=parts, shared_labels=False).load(Path())
    assert data.train.targets.tolist() == [0, 1, 1, 2, 4, 6]
    assert data.class_names == ("one: a", "one: b", "two: a", "two: b", "two: c", "three: a", "three: b")


def test_harmonised_images() -> None:
    parts = (Plain("one"), Plain("two", shape=(3, 16, 12)))
    with pytest.raises(DataError, match=r"expected images of one shape, got .*; set size and channels"):
        Joined(parts=parts).load(Path())
    data = Joined(parts=parts, size=10, channels=3).load(Path())
    assert data.inputs.shape == (3, 10, 10)
    assert data.train.inputs.eq(9).all()


def test_different_label_spaces() -> None:
    parts = (Plain("one"), Plain("two", num_classes=3))
    with pytest.raises(DataError, match="got 2 of one and 3 of two; set shared_labels = false"):
        Joined(parts=parts).load(Path())


def test_words_are_padded_alike() -> None:
    data = Joined(parts=(Words(("ab", "c")), Words(("lengthy",)))).load(Path())
    assert decode_words(data.train.targets) == ["ab", "c", "lengthy"]
    assert data.task == WordRecognition()


def test_words_and_classes_do_not_mix() -> None:
    with pytest.raises(DataError, match="trained for the same task"):
        Joined(parts=(Plain("one"), Words(("a",)))).load(Path())


def test_words_share_their_alphabet() -> None:
    with pytest.raises(DataError, match="expected shared_labels = true for words"):
        Joined(parts=(Words(("a",)),), shared_labels=False).load(Path())


def test_no_parts() -> None:
    with pytest.raises(ValueError, match="expected at least one data set in parts"):
        Joined(parts=())
