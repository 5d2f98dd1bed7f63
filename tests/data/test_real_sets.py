"""The loaders on genuine files, where there are some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leaktight.core.errors import DataError
from leaktight.core.inputs import Images
from leaktight.data.arrays import FemnistDigits, OrlFaces
from leaktight.data.cifar import Cifar10, Cifar100
from leaktight.data.dataset import DatasetSource
from leaktight.data.embedded import Digits
from leaktight.data.folders import Imagenet, Lfw, TinyImagenet
from leaktight.data.idx import FashionMnist, Mnist
from leaktight.data.joined import Joined
from leaktight.data.words.collections import Iiit5k, Synth90k
from leaktight.data.words.images import decode_words

SETS: list[tuple[str, DatasetSource, tuple[int, int], tuple[int, int, int], int]] = [
    ("mnist", Mnist(), (60000, 10000), (1, 28, 28), 10),
    ("fashion_mnist", FashionMnist(part="test"), (8000, 2000), (1, 28, 28), 10),
    ("cifar10", Cifar10(), (10000, 10000), (3, 32, 32), 10),
    ("cifar100", Cifar100(part="test"), (2400, 600), (3, 32, 32), 100),
    ("cifar100_coarse", Cifar100(part="test", labels="coarse"), (2400, 600), (3, 32, 32), 20),
    ("femnist_digits", FemnistDigits(), (4798, 1199), (1, 28, 28), 10),
    ("orl_faces", OrlFaces(), (320, 80), (1, 64, 64), 40),
    ("tiny_imagenet", TinyImagenet(max_classes=20), (160, 40), (3, 64, 64), 20),
    ("imagenet", Imagenet(size=64), (58, 14), (3, 64, 64), 1000),
    ("lfw", Lfw(size=32, max_classes=20), (64, 16), (3, 32, 32), 20),
    ("synth90k", Synth90k(max_words=200), (160, 40), (3, 32, 100), 36),
    ("iiit5k", Iiit5k(), (320, 80), (3, 32, 100), 36),
]


@pytest.mark.parametrize(("name", "source", "counts", "shape", "num_classes"), SETS, ids=[row[0] for row in SETS])
def test_real_set(
    real_data: Path,
    name: str,
    source: DatasetSource,
    counts: tuple[int, int],
    shape: tuple[int, int, int],
    num_classes: int,
) -> None:
    data = source.load(real_data)
    assert name.startswith(data.name)
    assert (len(data.train), len(data.test)) == counts
    assert data.inputs == Images(*shape)
    assert data.num_classes == num_classes
    assert data.train.inputs.float().std() > 20


def test_known_first_labels(real_data: Path) -> None:
    assert Mnist().load(real_data).train.targets[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert Cifar10().load(real_data).train.targets[:5].tolist() == [6, 9, 9, 4, 1]


def test_real_words_are_those_in_the_file_names(real_data: Path) -> None:
    data = Iiit5k(test_share=0.01).load(real_data)
    assert {"private", "parking", "salutes", "dolce"} <= set(decode_words(data.train.targets[:10]))


def test_fashion_mnist_without_training_files(real_data: Path) -> None:
    if list((real_data / "fashion_mnist").glob("train-images*")):
        pytest.skip("the training files are there")
    with pytest.raises(DataError, match=r'`leaktight data fashion_mnist`.* set part = "test"'):
        FashionMnist().load(real_data)


def test_writers_are_natural_clients(real_data: Path) -> None:
    data = FemnistDigits().load(real_data)
    assert data.groups is not None
    assert torch.bincount(data.groups).min() > 100
    assert len(data.group_names) == 12


def test_joined_digits(real_data: Path) -> None:
    data = Joined(parts=(FemnistDigits(), Digits()), size=16, channels=3).load(real_data)
    assert data.inputs.shape == (3, 16, 16)
    assert data.group_names == ("femnist_digits", "digits")
