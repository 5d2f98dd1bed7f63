from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.seeds import replayed

from leaktight.core.errors import UsageError
from leaktight.core.tasks import WordRecognition
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.partition import (
    BySource,
    Dirichlet,
    Holding,
    Iid,
    LrpShards,
    OneClass,
    Partition,
    Pooled,
    Scheme,
    Shards,
)


def make_dataset(labels: Sequence[int], *, groups: Sequence[int] | None = None, names: tuple[str, ...] = ()) -> Dataset:
    targets = torch.tensor(labels)
    examples = Examples(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), targets)
    classes = tuple(f"class {label}" for label in range(int(targets.max()) + 1))
    return Dataset(
        "toy",
        examples,
        examples,
        classes,
        groups=None if groups is None else torch.tensor(groups),
        group_names=names,
    )


def words_dataset() -> Dataset:
    examples = Examples(torch.zeros(12, 1, 1, 1, dtype=torch.uint8), torch.zeros(12, 3, dtype=torch.long))
    return Dataset("words", examples, examples, ("a",), WordRecognition())


def owned(holding: Holding) -> list[int]:
    return sorted(holding.train.tolist() + holding.validation.tolist())


def owners(partition: Partition) -> list[list[int]]:
    return [owned(holding) for holding in partition.clients.values()]


def classes_of(dataset: Dataset, holding: Holding) -> set[int]:
    return set(dataset.train.targets[torch.tensor(owned(holding))].tolist())


quick = settings(max_examples=30, deadline=None)  # the machine may be busy: no time limits
label_lists = st.lists(st.integers(0, 4), min_size=40, max_size=120)
COMPLETE: list[Scheme] = [
    Iid(clients=7),
    Shards(clients=5, shards_per_client=3),
    LrpShards(clients=6, shard_size=4, min_shards=1, max_shards=9),
    Dirichlet(clients=4, alpha=1.0, min_examples=1),
    OneClass(),
    Pooled(),
    BySource(),
]


@pytest.mark.parametrize("scheme", COMPLETE, ids=lambda scheme: type(scheme).__name__)
@quick
@given(labels=label_lists, seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.2, 0.5, 0.99]))
def test_every_example_has_exactly_one_owner(scheme: Scheme, labels: list[int], seed: int, share: float) -> None:
    dataset = make_dataset(labels, groups=[place % 3 for place in range(len(labels))])
    partition = dataclasses.replace(scheme, validation=share).split(dataset, rng=replayed(seed))
    assert sorted(index for client in owners(partition) for index in client) == list(range(len(labels)))
    assert list(partition.clients) == sorted(partition.clients)
    for holding in partition.clients.values():
        assert len(holding.train) >= 1
        assert len(holding.validation) == min(round(share * len(holding)), len(holding) - 1)
        assert holding.train.tolist() == sorted(holding.train.tolist())


@quick
@given(count=st.integers(1, 200), clients=st.integers(1, 200), seed=st.integers(0, 99))
def test_iid_sizes_differ_by_at_most_one(count: int, clients: int, seed: int) -> None:
    dataset = make_dataset([0] * count)
    scheme = Iid(clients=clients)
    if clients > count:
        with pytest.raises(UsageError, match="lower the number of clients"):
            scheme.split(dataset, rng=replayed(seed))
        return
    sizes = [len(client) for client in owners(scheme.split(dataset, rng=replayed(seed)))]
    assert len(sizes) == clients
    assert max(sizes) - min(sizes) <= 1


def test_the_seed_decides_and_the_hold_out_does_not_change_the_owners() -> None:
    dataset = make_dataset([0, 1, 2, 3] * 25)
    for scheme in COMPLETE[:4]:
        first = owners(scheme.split(dataset, rng=replayed(1)))
        assert owners(scheme.split(dataset, rng=replayed(1))) == first
        assert owners(dataclasses.replace(scheme, validation=0.5).split(dataset, rng=replayed(1))) == first
        assert owners(scheme.split(dataset, rng=replayed(2))) != first


def test_the_hold_out_is_random() -> None:
    holding = Pooled().split(make_dataset([0] * 100), rng=replayed(3)).clients["client-000"]
    assert len(holding.validation) == 20
    assert holding.validation.tolist() not in (list(range(20)), list(range(80, 100)))


def test_equal_shards_give_every_client_few_classes() -> None:
    dataset = make_dataset([label for label in range(10) for _ in range(60)])
    partition = Shards(clients=10, shards_per_client=2).split(dataset, rng=replayed(0))
    assert [len(client) for client in owners(partition)] == [60] * 10
    assert all(len(classes_of(dataset, holding)) <= 2 for holding in partition.clients.values())


@quick
@given(
    clients=st.integers(1, 30),
    low=st.integers(1, 4),
    room=st.integers(0, 5),
    fill=st.floats(0, 1),
    size=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_lrp_shards_stay_within_their_bounds_and_all_are_dealt(
    clients: int, low: int, room: int, fill: float, size: int, seed: int
) -> None:
    num_shards = clients * low + int(fill * clients * room)
    dataset = make_dataset([place % 10 for place in range(num_shards * size)])
    scheme = LrpShards(clients=clients, shard_size=size, min_shards=low, max_shards=low + room)
    sizes = [len(client) for client in owners(scheme.split(dataset, rng=replayed(seed)))]
    assert sum(sizes) == num_shards * size
    assert all(size * low <= held <= size * (low + room) for held in sizes)


def test_lrp_shards_of_the_paper() -> None:
    """MNIST: 300 shards of 200 on 100 clients, one to nine each, at most two classes in a shard."""
    dataset = make_dataset([place % 10 for place in range(60_000)])
    partition = LrpShards().split(dataset, rng=replayed(1024))
    sizes = [len(client) for client in owners(partition)]
    assert len(sizes) == 100
    assert all(held % 200 == 0 and 200 <= held <= 1800 for held in sizes)
    assert len(set(sizes)) > 3
    assert all(len(classes_of(dataset, h)) <= 2 * len(h) // 200 for h in partition.clients.values())


@pytest.mark.parametrize(
    ("count", "remedy"), [(50_000, "raise shard_size, clients or max_shards"), (4_000, "lower shard_size")]
)
def test_shards_that_do_not_fit_are_refused(count: int, remedy: str) -> None:
    """The first case is the paper's own for CIFAR: 1000 shards of 50 for 100 clients with nine at most."""
    with pytest.raises(UsageError, match=remedy):
        LrpShards(shard_size=50).split(make_dataset([0] * count), rng=replayed(0))


def test_a_small_alpha_is_less_even() -> None:
    dataset = make_dataset([0, 1, 2, 3, 4] * 200)

    def largest_share(alpha: float) -> float:
        partition = Dirichlet(clients=5, alpha=alpha).split(dataset, rng=replayed(0))
        shares = []
        for holding in partition.clients.values():
            counts = torch.bincount(dataset.train.targets[torch.tensor(owned(holding))], minlength=5)
            shares.append(float(counts.max() / counts.sum()))
        return sum(shares) / len(shares)

    assert largest_share(1000.0) < 0.25 < 0.45 < largest_share(0.1)


@quick
@given(clients=st.integers(1, 8), least=st.integers(1, 5), seed=st.integers(0, 99))
def test_dirichlet_gives_every_client_its_minimum(clients: int, least: int, seed: int) -> None:
    partition = Dirichlet(clients=clients, min_examples=least).split(make_dataset([0, 1] * 100), rng=replayed(seed))
    assert min(len(client) for client in owners(partition)) >= least


def test_dirichlet_gives_up_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="raise alpha, or lower clients or min_examples"):
        Dirichlet(clients=50, alpha=0.01, min_examples=2).split(make_dataset([0, 1] * 60), rng=replayed(0))


@quick
@given(clients=st.integers(1, 12))
def test_one_class_shares_evenly_and_never_mixes(clients: int) -> None:
    dataset = make_dataset([label for label in range(4) for _ in range(9)])
    partition = OneClass(clients=clients).split(dataset, rng=replayed(0))
    assert len(partition) == clients
    assert all(len(classes_of(dataset, holding)) == 1 for holding in partition.clients.values())
    everyone = [index for client in owners(partition) for index in client]
    assert len(everyone) == len(set(everyone)) == 9 * min(clients, 4)


def test_one_class_skips_classes_without_examples() -> None:
    dataset = make_dataset([0, 0, 3, 3])
    partition = OneClass().split(dataset, rng=replayed(0))
    assert [classes_of(dataset, holding) for holding in partition.clients.values()] == [{0}, {3}]


def test_one_class_refuses_more_clients_than_a_class_has_examples() -> None:
    with pytest.raises(UsageError, match="share class 'class 0', got 1; lower clients"):
        OneClass(clients=4).split(make_dataset([0, 1, 1]), rng=replayed(0))


def test_sources_become_clients_with_their_names() -> None:
    dataset = make_dataset([0, 1, 0, 1, 0], groups=[2, 0, 2, 0, 2], names=("anna b.", "unused", "c/d"))
    partition = BySource(validation=0).split(dataset, rng=replayed(0))
    assert {name: owned(holding) for name, holding in partition.clients.items()} == {
        "client-000-anna-b.": [1, 3],
        "client-001-c-d": [0, 2, 4],
    }


def test_sources_must_be_named() -> None:
    with pytest.raises(UsageError, match="choose another partition"):
        BySource().split(make_dataset([0, 1]), rng=replayed(0))


def test_names_sort_when_there_are_many() -> None:
    names = list(Iid(clients=1001).split(make_dataset([0] * 1001), rng=replayed(0)).clients)
    assert names == sorted(names)
    assert names[-1] == "client-1000"


@pytest.mark.parametrize("scheme", [Shards(clients=2), Dirichlet(clients=2), OneClass(), LrpShards(clients=2)])
def test_words_cannot_be_divided_by_class(scheme: Scheme) -> None:
    with pytest.raises(UsageError, match="choose the partition iid"):
        scheme.split(words_dataset(), rng=replayed(0))


def test_words_can_be_divided_evenly() -> None:
    assert len(Iid(clients=3).split(words_dataset(), rng=replayed(0))) == 3


@pytest.mark.parametrize(
    "scheme", [Shards(clients=3, shards_per_client=5), Dirichlet(clients=8, min_examples=2), Iid(clients=11)]
)
def test_too_few_examples_are_one_clear_line(scheme: Scheme) -> None:
    with pytest.raises(UsageError, match=r"toy: expected .* got 10; lower the number of") as caught:
        scheme.split(make_dataset([0, 1] * 5), rng=replayed(0))
    assert "\n" not in str(caught.value)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="expected clients of at least 1, got 0"):
        Iid(clients=0)
    with pytest.raises(ValueError, match="expected validation in"):
        Pooled(validation=1.0)
    with pytest.raises(ValueError, match="expected max_shards"):
        LrpShards(min_shards=3, max_shards=2)
    with pytest.raises(ValueError, match="expected alpha above 0"):
        Dirichlet(alpha=0.0)
