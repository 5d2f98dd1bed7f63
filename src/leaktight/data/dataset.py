"""A loaded data set, and the settings that load one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import platformdirs
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.inputs import Inputs
from leaktight.core.scope import not_supported
from leaktight.core.tasks import Classification, Task
from leaktight.core.types import Examples


@dataclass(frozen=True)
class Dataset:
    """Training and test examples with the names of their classes.

    groups: the natural client (writer, source) of each training example (N,), or None. group_names: their names.
    note: what readers should know about it, such as files that are missing; empty for nothing.
    """

    name: str
    train: Examples
    test: Examples
    class_names: tuple[str, ...]
    task: Task = Classification()
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.task, Task):
            raise DataError(f"{self.name}: {not_supported(f'the task {type(self.task).__name__}')}")
        if not len(self.train) or not len(self.test):
            raise DataError(
                f"{self.name}: expected training and test examples, got {len(self.train)}, {len(self.test)}"
            )
        if self.train.example != self.test.example:
            raise DataError(f"{self.name}: expected test examples of {self.train.example}, got {self.test.example}")
        for part, examples in (("training", self.train), ("test", self.test)):
            if (outside := self.task.outside_targets(examples.targets)) is not None:
                raise DataError(f"{self.name}: {outside}")
            if (fault := self.task.fault(examples.targets, self.num_classes)) is not None:
                raise DataError(
                    f"{self.name}: expected {part} {fault}; "
                    "the label file does not belong to these images, or the number of classes is wrong"
                )

    @property
    def inputs(self) -> Inputs:
        return self.train.example

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


@runtime_checkable
class DatasetSource(Protocol):
    """Settings of a data set. root: the folder that holds downloaded data sets; it may not exist."""

    def load(self, root: Path) -> Dataset: ...


def data_root(option: Path | None = None) -> Path:
    """Where data sets lie: the option, else the environment's LEAKTIGHT_DATA, else the user's cache folder."""
    if option is not None:
        return option.expanduser()
    environment = os.environ.get("LEAKTIGHT_DATA")
    return Path(environment).expanduser() if environment else platformdirs.user_cache_path("leaktight")
