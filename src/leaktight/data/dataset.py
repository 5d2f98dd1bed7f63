"""What a data set is, once loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.tasks import Classification, Task
from leaktight.core.types import Examples, ImageShape


@dataclass(frozen=True)
class Dataset:
    """Training and test examples with the names of their classes.

    groups: where the data comes with natural clients (writers, sources), the group of each training example (N,).
    """

    name: str
    train: Examples
    test: Examples
    class_names: tuple[str, ...]
    task: Task = Classification()
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.train) or not len(self.test):
            raise DataError(
                f"{self.name}: expected training and test examples, got {len(self.train)}, {len(self.test)}"
            )
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise DataError(f"{self.name}: training and test images differ in shape")
        for part, examples in (("training", self.train), ("test", self.test)):
            low, high = int(examples.targets.min()), int(examples.targets.max())
            if examples.targets.ndim == 1 and not 0 <= low <= high < self.num_classes:
                raise DataError(
                    f"{self.name}: expected {part} labels in 0..{self.num_classes - 1}, got {low}..{high}; "
                    "the label file does not belong to these images, or the number of classes is wrong"
                )

    @property
    def shape(self) -> ImageShape:
        return ImageShape(*self.train.images.shape[1:])

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


@runtime_checkable
class DatasetSource(Protocol):
    """Settings that name a data set. `root` is the folder below which downloaded sets lie; it may not exist."""

    def load(self, root: Path) -> Dataset: ...
