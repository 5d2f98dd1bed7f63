from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.seeds import replayed

from leaktight.core.tasks import WordRecognition
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.holdings import class_counts, label_skew, plot_summary, text_summary
from leaktight.data.partition import BySource, Iid, LrpShards, OneClass, Pooled, Shards


def make_dataset(num_classes: int, per_class: int) -> Dataset:
    targets = torch.arange(num_classes).repeat(per_class)
    examples = Examples(torch.zeros(len(targets), 1, 1, 1, dtype=torch.uint8), targets)
    return Dataset("toy", examples, examples, tuple(f"name{label}" for label in range(num_classes)))


def words_dataset() -> Dataset:
    examples = Examples(torch.zeros(12, 1, 1, 1, dtype=torch.uint8), torch.zeros(12, 3, dtype=torch.long))
    return Dataset(
        "words",
        examples,
        examples,
        ("a",),
        WordRecognition(),
        groups=torch.arange(12) % 2,
        group_names=("svt", "iiit5k"),
    )


def test_counts_are_those_of_the_labels() -> None:
    dataset = make_dataset(3, 8)
    counts = class_counts(dataset, OneClass(clients=6).split(dataset, rng=replayed(0)))
    np.testing.assert_array_equal(counts, np.tile(4 * np.eye(3, dtype=int), (2, 1)))


def test_skew_is_zero_when_all_are_alike_and_grows_to_one() -> None:
    np.testing.assert_allclose(label_skew(np.array([[5, 5], [1, 1]])), [0, 0])
    np.testing.assert_allclose(label_skew(np.array([[5, 0], [0, 5]])), [0.5, 0.5])
    np.testing.assert_allclose(label_skew(10 * np.eye(10, dtype=np.int64)), [0.9] * 10)


def test_a_few_clients_are_all_in_the_table() -> None:
    dataset = make_dataset(3, 10)
    text = text_summary(dataset, OneClass().split(dataset, rng=replayed(0)))
    assert text.splitlines() == [
        "toy: 30 of 30 training examples on 3 clients, 3 classes; label skew 0.67 (0: all alike)",
        "",
        "client      train  validation  classes  name0  name1  name2",
        "client-000      8           2        1     10      .      .",
        "client-001      8           2        1      .     10      .",
        "client-002      8           2        1      .      .     10",
    ]


def test_many_clients_are_summed_up_and_the_extremes_shown() -> None:
    dataset = make_dataset(10, 600)
    partition = LrpShards(clients=100, shard_size=20).split(dataset, rng=replayed(0))
    text = text_summary(dataset, partition)
    assert len(text.splitlines()) < 25
    sizes = {name: len(holding) for name, holding in partition.clients.items()}
    train = [len(holding.train) for holding in partition.clients.values()]
    row = next(line.split() for line in text.splitlines() if line.startswith("train"))
    assert (float(row[1]), float(row[3]), float(row[4])) == (min(train), sum(train) / 100, max(train))
    assert max(sizes, key=lambda name: sizes[name]) in text
    assert sum(line.startswith("client-") for line in text.splitlines()) == 10


def test_some_classes_are_bars_and_many_are_named() -> None:
    for num_classes, mark in ((20, "█"), (100, "name7: 4")):
        dataset = make_dataset(num_classes, 4)
        text = text_summary(dataset, OneClass(clients=20).split(dataset, rng=replayed(0)))
        assert len(text.splitlines()) == 23
        assert mark in text


def test_words_have_no_classes() -> None:
    dataset = words_dataset()
    text = text_summary(dataset, BySource(validation=0).split(dataset, rng=replayed(0)))
    assert "classes" not in text
    assert text.splitlines()[-1].split() == ["client-001-iiit5k", "6", "0"]


@pytest.mark.parametrize("clients", [1, 20, 100])
def test_the_picture_grows_with_the_clients(clients: int, tmp_path: Path) -> None:
    dataset = make_dataset(5, 100)
    path = plot_summary(dataset, Iid(clients=clients).split(dataset, rng=replayed(0)), tmp_path / "new" / "who.png")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[0] >= 20 * clients
    assert pixels.std() > 10


def test_pictures_of_words_many_classes_and_one_client(tmp_path: Path) -> None:
    words, many = words_dataset(), make_dataset(100, 2)
    for name, dataset, scheme in (
        ("words", words, BySource()),
        ("many", many, Shards(clients=10)),
        ("one", many, Pooled()),
    ):
        path = plot_summary(dataset, scheme.split(dataset, rng=replayed(0)), tmp_path / f"{name}.png")
        assert path.stat().st_size > 5000
