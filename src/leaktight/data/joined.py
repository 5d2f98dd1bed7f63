"""Several data sets as one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from leaktight.core.errors import DataError
from leaktight.core.tasks import Task
from leaktight.core.text import sides
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset, DatasetSource
from leaktight.data.images import convert_channels, resize_images
from leaktight.data.settings import check_channels, check_minimum


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Several data sets as one; the data set of an example is its group, the natural client.

    parts: the data sets. size, channels: convert all images; None keeps them, and they must agree.
    shared_labels: True if label k is the same class in all parts; False gives every part its own classes.
    """

    parts: tuple[DatasetSource, ...]
    size: int | None = None
    channels: int | None = None
    shared_labels: bool = True

    def __post_init__(self) -> None:
        check_minimum(self, 1, "size")
        check_channels(self.channels)
        if not self.parts:
            raise ValueError("expected at least one data set in parts, got none; name some")

    def load(self, root: Path) -> Dataset:
        sets = [part.load(root) for part in self.parts]
        names = tuple(one.name for one in sets)
        class_names, offsets = self._classes(sets)
        task = sets[0].task
        train = self._merge([one.train for one in sets], offsets, names, task)
        test = self._merge([one.test for one in sets], offsets, names, task)
        groups = torch.cat([torch.full((len(one.train),), place) for place, one in enumerate(sets)])
        return Dataset("+".join(names), train, test, class_names, task, groups=groups, group_names=names)

    def _classes(self, sets: list[Dataset]) -> tuple[tuple[str, ...], list[int]]:
        first = sets[0]
        if any(one.task != first.task for one in sets):
            raise DataError("expected parts that are trained for the same task, got words and classes; join one kind")
        if self.shared_labels:
            odd = next((one for one in sets if one.num_classes != first.num_classes), None)
            if odd is not None:
                raise DataError(
                    f"expected parts with the same classes, got {first.num_classes} of {first.name} and "
                    f"{odd.num_classes} of {odd.name}; set shared_labels = false"
                )
            return first.class_names, [0] * len(sets)
        if not first.task.one_class:
            raise DataError("expected shared_labels = true for words, got false; all words have one alphabet")
        names = tuple(f"{one.name}: {label}" for one in sets for label in one.class_names)
        counts = torch.tensor([0] + [one.num_classes for one in sets[:-1]])
        return names, counts.cumsum(0).tolist()

    def _merge(self, parts: list[Examples], offsets: list[int], names: tuple[str, ...], task: Task) -> Examples:
        images = [resize_images(convert_channels(part.inputs, self.channels), self.size) for part in parts]
        shapes = {name: sides(tensor.shape[1:]) for name, tensor in zip(names, images, strict=True)}
        if len(set(shapes.values())) > 1:
            got = ", ".join(f"{shape} in {name}" for name, shape in shapes.items())
            raise DataError(f"expected images of one shape, got {got}; set size and channels")
        targets = [part.targets + offset for part, offset in zip(parts, offsets, strict=True)]
        return Examples(torch.cat(images), task.join(targets))
