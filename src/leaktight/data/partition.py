"""Schemes that divide the training examples of a data set among clients."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.rng import Rng
from leaktight.data.dataset import Dataset

_DIRICHLET_DRAWS = 1000


@dataclass(frozen=True, eq=False)
class Holding:
    """One client's examples, as sorted indices into the training set."""

    train: Tensor
    validation: Tensor

    def __len__(self) -> int:
        return len(self.train) + len(self.validation)


@dataclass(frozen=True, eq=False)
class Partition:
    """The holdings by client, sorted by name. No example has two owners."""

    clients: Mapping[str, Holding]

    def __len__(self) -> int:
        return len(self.clients)


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """A scheme that divides a data set. validation: the share of each client's examples for validation, in [0, 1)."""

    validation: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"expected validation in [0, 1), got {self.validation}; 0.2 sets aside a fifth")

    @abstractmethod
    def assign(self, dataset: Dataset, *, rng: Rng) -> Sequence[Tensor]:
        """The training examples of each client, as indices."""

    def labels(self, dataset: Dataset) -> Sequence[str]:
        """A label for each client, added to its number in its name; empty for numbers only."""
        return ()

    def split(self, dataset: Dataset, *, rng: Rng) -> Partition:
        """Divide the training set of `dataset`. The same seed gives the same partition."""
        owned = self.assign(dataset, rng=rng.child("assign"))
        empty = sum(len(indices) == 0 for indices in owned)
        if empty or not owned:
            raise UsageError(
                f"{dataset.name}: expected an example for every client, got {empty} of {len(owned)} clients without; "
                "lower the number of clients"
            )
        names = _client_names(len(owned), self.labels(dataset))
        return Partition(
            {
                name: _hold_out(indices, self.validation, rng=rng.child("validation", name))
                for name, indices in zip(names, owned, strict=True)
            }
        )


@dataclass(frozen=True, kw_only=True)
class Counted(Scheme, ABC):
    """A scheme with a given number of clients. clients: how many."""

    clients: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_at_least("clients", self.clients, 1)


@dataclass(frozen=True, kw_only=True)
class Iid(Counted):
    """Every client gets a random share of the same size."""

    def assign(self, dataset: Dataset, *, rng: Rng) -> Sequence[Tensor]:
        _expect_enough(dataset, self.clients, "client")
        return torch.tensor_split(_shuffled(torch.arange(len(dataset.train)), rng), self.clients)


@dataclass(frozen=True, kw_only=True)
class Shards(Counted):
    """Data sorted by label and cut into equal shards; every client gets the same number of random shards.

    shards_per_client: how many.

    Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
    Shard sizes differ by one where the number of examples is not a multiple of the number of shards.
    """

    shards_per_client: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_at_least("shards_per_client", self.shards_per_client, 1)

    def assign(self, dataset: Dataset, *, rng: Rng) -> Sequence[Tensor]:
        num_shards = self.clients * self.shards_per_client
        _expect_enough(dataset, num_shards, "shard")
        shards = torch.tensor_split(_by_label(dataset), num_shards)
        order = _shuffled(torch.arange(num_shards), rng).view(self.clients, self.shards_per_client)
        return [torch.cat([shards[shard] for shard in row.tolist()]) for row in order]


@dataclass(frozen=True, kw_only=True)
class LrpShards(Counted):
    """Data sorted by label and cut into shards, assigned at random: clients get different numbers of shards.

    shard_size: examples of a shard. min_shards, max_shards: every client starts with `min_shards`; each further shard
    goes to a random client that has fewer than `max_shards`.
    Reference: LRP, section 5.1 (MNIST: 300 shards of 200 on 100 clients, 1 to 9 each).
    Differs from the paper: its numbers for CIFAR (1000 shards of 50 on 100 clients, at most 9 each) leave 100 shards
    without a client, which is an error here; take max_shards = 10 or more, or shard_size = 56.
    """

    clients: int = 100
    shard_size: int = 200
    min_shards: int = 1
    max_shards: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_at_least("shard_size", self.shard_size, 1)
        _expect_at_least("min_shards", self.min_shards, 1)
        if self.max_shards < self.min_shards:
            raise ValueError(f"expected max_shards of at least min_shards = {self.min_shards}, got {self.max_shards}")

    def assign(self, dataset: Dataset, *, rng: Rng) -> Sequence[Tensor]:
        shards = torch.split(_by_label(dataset), self.shard_size)
        low, high = self.clients * self.min_shards, self.clients * self.max_shards
        if not low <= len(shards) <= high:
            remedy = (
                "lower shard_size, clients or min_shards"
                if len(shards) < low
                else "raise shard_size, clients or max_shards"
            )
            raise UsageError(
                f"{dataset.name}: expected {low} to {high} shards for {self.clients} clients with {self.min_shards} "
                f"to {self.max_shards} each, got {len(shards)} of {self.shard_size} examples; {remedy}"
            )
        draw = rng.public_numpy()
        counts = np.full(self.clients, self.min_shards)
        for _ in range(len(shards) - low):
            counts[draw.choice(np.flatnonzero(counts < self.max_shards))] += 1
        order = torch.from_numpy(draw.permutation(len(shards)))
        return [torch.cat([shards[s] for s in part.tolist()]) for part in torch.split(order, counts.tolist())]


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Counted):
    """Each class is divided among the clients in proportions drawn from a Dirichlet; uneven for a small alpha.

    alpha: the concentration, > 0; the smaller, the more uneven.
    min_examples: drawn again until every client has so many, up to 1000 times.
    Reference: Li et al., Federated Learning on Non-IID Data Silos: An Experimental Study, 2022.
    """

    alpha: float = 0.5
    min_examples: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_at_least("min_examples", self.min_examples, 1)
        if not self.alpha > 0:
            raise ValueError(f"expected alpha above 0, got {self.alpha}; 0.5 is uneven, 100 is nearly even")

    def assign(self, dataset: Dataset, *, rng: Rng) -> Sequence[Tensor]:
        _expect_enough(dataset, self.clients, "client", each=self.min_examples)
        groups = _examples_of_classes(dataset)
        counts = self._counts(dataset.name, [len(group) for group in groups], rng.child("proportions"))
        parts = [
            torch.split(_shuffled(group, rng.child("order", place)), row)
            for place, (group, row) in enumerate(zip(groups, counts.tolist(), strict=True))
        ]
        return [torch.cat(of_client) for of_client in zip(*parts, strict=True)]

    def _counts(
        self, name: str, class_sizes: Sequence[int], rng: Rng
    ) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """How many examples of each class (rows) each client (columns) gets."""
        draw = rng.public_numpy()
        sizes = np.asarray(class_sizes)[:, None]
        for _ in range(_DIRICHLET_DRAWS):
            shares = draw.dirichlet(np.full(self.clients, self.alpha), size=len(sizes))
            ends = np.floor(np.cumsum(shares, axis=1) * sizes + 0.5).astype(np.int64)
            ends[:, -1] = sizes[:, 0]
            counts: NDArray[np.int64] = np.diff(ends, axis=1, prepend=0)
            if counts.sum(axis=0).min() >= self.min_examples:
                return counts
        raise UsageError(
            f"{name}: expected {self.min_examples} examples or more for each of {self.clients} clients, got fewer in "
            f"each of {_DIRICHLET_DRAWS} draws with alpha = {self.alpha}; raise alpha, or lower clients or min_examples"
        )


@dataclass(frozen=True, kw_only=True)
class OneClass(Scheme):
    """Every client holds examples of one class only; by default one client per class.

    clients: their number; None: one per class. With more clients than classes, several clients share a class evenly;
    with fewer, the last classes are unused.
    """

    clients: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clients is not None:
            _expect_at_least("clients", self.clients, 1)

    def assign(self, dataset: Dataset, *, rng: Rng) -> Sequence[Tensor]:
        groups = _examples_of_classes(dataset)
        clients = self.clients or len(groups)
        owned: list[Tensor] = [torch.empty(0)] * clients
        for place, group in enumerate(groups[:clients]):
            sharers = range(place, clients, len(groups))
            if len(group) < len(sharers):
                label = dataset.class_names[int(dataset.train.targets[group[0]])]
                raise UsageError(
                    f"{dataset.name}: expected an example for each of {len(sharers)} clients that share class "
                    f"{label!r}, got {len(group)}; lower clients"
                )
            parts = torch.tensor_split(_shuffled(group, rng.child(place)), len(sharers))
            for client, part in zip(sharers, parts, strict=True):
                owned[client] = part
        return owned


@dataclass(frozen=True, kw_only=True)
class BySource(Scheme):
    """One client per group of the data set: a writer, or one of several joined data sets."""

    def assign(self, dataset: Dataset, *, rng: Rng) -> Sequence[Tensor]:
        groups = self._groups(dataset)
        return [torch.nonzero(groups == group).flatten() for group in torch.unique(groups)]

    def labels(self, dataset: Dataset) -> Sequence[str]:
        if not dataset.group_names:
            return ()
        return [dataset.group_names[int(group)] for group in torch.unique(self._groups(dataset))]

    def _groups(self, dataset: Dataset) -> Tensor:
        if dataset.groups is None:
            raise UsageError(
                f"{dataset.name}: expected a data set that names the source of each example, got one that does not; "
                "choose another partition, such as iid"
            )
        return dataset.groups


@dataclass(frozen=True, kw_only=True)
class Pooled(Scheme):
    """One client that holds everything: centralised training."""

    def assign(self, dataset: Dataset, *, rng: Rng) -> Sequence[Tensor]:
        return [torch.arange(len(dataset.train))]


def _expect_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}")


def _expect_enough(dataset: Dataset, parts: int, what: str, each: int = 1) -> None:
    if len(dataset.train) < parts * each:
        raise UsageError(
            f"{dataset.name}: expected {parts * each} training examples or more for {parts} {what}s, "
            f"got {len(dataset.train)}; lower the number of {what}s"
        )


def _class_labels(dataset: Dataset) -> Tensor:
    if not dataset.task.one_class:
        raise UsageError(
            f"{dataset.name}: expected one class per example to divide by class, got words; "
            "choose the partition iid, by_source or pooled"
        )
    return dataset.train.targets


def _by_label(dataset: Dataset) -> Tensor:
    """All training examples, sorted by label, in their own order within a label."""
    return torch.argsort(_class_labels(dataset), stable=True)


def _examples_of_classes(dataset: Dataset) -> list[Tensor]:
    """The training examples of each class that has any, in the order of the classes."""
    labels = _class_labels(dataset)
    return [torch.nonzero(labels == label).flatten() for label in torch.unique(labels)]


def _shuffled(indices: Tensor, rng: Rng) -> Tensor:
    return indices[torch.randperm(len(indices), generator=rng.public())]


def _client_names(count: int, labels: Sequence[str]) -> list[str]:
    """Client names that sort in numerical order and are safe as file names."""
    width = max(3, len(str(count - 1)))
    names = [f"client-{number:0{width}d}" for number in range(count)]
    if not labels:
        return names
    return [f"{name}-{re.sub(r'[^A-Za-z0-9_.]+', '-', label)}" for name, label in zip(names, labels, strict=True)]


def _hold_out(indices: Tensor, share: float, *, rng: Rng) -> Holding:
    """Set aside a random share for validation, but never the last training example."""
    size = min(round(share * len(indices)), len(indices) - 1)
    mixed = _shuffled(indices, rng)
    return Holding(train=mixed[size:].sort().values, validation=mixed[:size].sort().values)
