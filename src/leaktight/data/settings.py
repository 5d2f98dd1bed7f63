"""Settings that data sets share, and the split into a training and a test part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.rng import Rng
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.files import MissingDataError
from leaktight.data.images import resize_images

Part = Literal["train", "test"]
PARTS = ("both", "train", "test")
_PUBLISHED: tuple[Part, ...] = ("train", "test")


def check_minimum(settings: object, minimum: int, *names: str) -> None:
    """Raise ValueError unless each named field is None or at least `minimum`."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < minimum:
            raise ValueError(f"expected {name} >= {minimum}, got {value}; raise it or leave it out")


def check_channels(channels: int | None) -> None:
    if channels not in (None, 1, 3):
        raise ValueError(f"expected channels 1 (grey) or 3 (colour), got {channels}; set one of them")


def stratified_split(strata: Tensor, test_share: float, rng: Rng) -> tuple[Tensor, Tensor]:
    """Sorted indices of the training and of the test examples. strata: the stratum of each example, integers (N,).

    Every stratum gives `test_share` of its examples to the test part, to within one example. The remainders are rounded
    so that the whole test part has its share too, and each part has at least one example.
    """
    count = len(strata)
    if count < 2:
        raise DataError(f"expected at least 2 examples to cut into training and test, got {count}; add some")
    wanted = min(max(round(test_share * count), 1), count - 1)
    keys, sizes = torch.unique(strata, return_counts=True)
    quota = sizes.double() * (wanted / count)
    takes = quota.floor().long()
    generator = rng.public()
    # A random order, then a stable sort: the seed decides between equal remainders, not the class number.
    order = torch.randperm(len(keys), generator=generator)
    order = order[torch.argsort((quota - takes)[order], descending=True, stable=True)]
    takes[order[: wanted - int(takes.sum())]] += 1
    test = []
    for key, take in zip(keys, takes.tolist(), strict=True):
        members = torch.nonzero(strata == key).flatten()
        test.append(members[torch.randperm(len(members), generator=generator)[:take]])
    in_test = torch.zeros(count, dtype=torch.bool)
    in_test[torch.cat(test)] = True
    return torch.nonzero(~in_test).flatten(), torch.nonzero(in_test).flatten()


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """A data set that is split into training and test examples.

    test_share: the share of each class for testing, in (0, 1). split_seed: selects the test examples.
    """

    test_share: float = 0.2
    split_seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.test_share < 1:
            raise ValueError(f"expected test_share between 0 and 1, got {self.test_share}; 0.2 is a fifth")

    def cut(self, strata: Tensor) -> tuple[Tensor, Tensor]:
        return stratified_split(strata, self.test_share, Rng(self.split_seed).child("split"))

    def divide(self, examples: Examples) -> tuple[Examples, Examples]:
        train, test = self.cut(examples.targets)
        return examples.take(train), examples.take(test)


@dataclass(frozen=True, kw_only=True)
class PartSettings(SplitSettings):
    """A data set that is published as a training and a test part.

    part: "both" as published; "train" or "test" uses only that part and splits it by `test_share`, where the other is
    missing. size: pixels per side after resizing; None keeps the images as they are.
    """

    part: Literal["both", "train", "test"] = "both"
    size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, 1, "size")
        if self.part not in PARTS:
            raise ValueError(f"expected part to be one of {', '.join(PARTS)}, got {self.part!r}")

    def from_parts(self, name: str, read: Callable[[Part], Examples], class_names: tuple[str, ...]) -> Dataset:
        """The data set of the parts that `read` returns."""
        if self.part != "both":
            return Dataset(name, *self.divide(self._sized(read(self.part))), class_names)
        try:
            train, test = read("train"), read("test")
        except MissingDataError as error:
            raise MissingDataError(f"{error}{_part_hint(read)}") from None
        return Dataset(name, self._sized(train), self._sized(test), class_names)

    def _sized(self, examples: Examples) -> Examples:
        return Examples(resize_images(examples.inputs, self.size), examples.targets)


def _part_hint(read: Callable[[Part], Examples]) -> str:
    """The end of the message when one part is missing and the other is present."""
    for part in _PUBLISHED:
        with suppress(DataError):
            read(part)
            return f', or set part = "{part}" to split the other part'
    return ""
