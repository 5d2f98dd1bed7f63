"""Data that is in memory already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.inputs import number_kind
from leaktight.core.scope import checked_shape, outside_inputs, outside_targets
from leaktight.core.tensors import digest
from leaktight.core.text import sides
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.settings import SplitSettings


@dataclass(frozen=True, kw_only=True)
class GivenImages(SplitSettings):
    """Images and labels as tensors; a share of each class is kept for testing.

    images: (N, C, H, W), floats in [0, 1] (kept as bytes, like all data) or bytes. labels: (N,), integers from 0.
    """

    images: Tensor
    labels: Tensor

    def record(self) -> dict[str, str]:
        return {"kind": "tensors", "digest": digest({"images": self.images, "labels": self.labels})}

    def load(self, root: Path) -> Dataset:
        """The data set; `root` is not used."""
        self._check()
        examples = Examples(self._bytes(), self.labels.to(torch.int64))
        classes = tuple(str(number) for number in range(int(self.labels.max()) + 1))
        return Dataset("own images", *self.divide(examples), classes)

    def _check(self) -> None:
        shape, count = self.images.shape, len(self.images)
        outside = outside_inputs(shape, number_kind(self.images))
        if outside or (outside := outside_targets(self.labels.shape, number_kind(self.labels), count)):
            raise DataError(outside)
        if 0 in shape:
            raise DataError(f"expected images, got none (shape {sides(shape)})")
        if len(shape) != 4:
            raise DataError(f"expected images (N, C, H, W), got {sides(shape)}; for grey images give images[:, None]")
        checked_shape(tuple(shape[1:]))
        if self.labels.shape != (count,) or self.labels.is_floating_point():
            kind = str(self.labels.dtype).removeprefix("torch.")
            raise DataError(
                f"expected labels (N,) of integers, one for each of {count} images, got "
                f"{sides(self.labels.shape)} of {kind}"
            )

    def _bytes(self) -> Tensor:
        if self.images.dtype == torch.uint8:
            return self.images
        if not self.images.is_floating_point() or not bool(((self.images >= 0) & (self.images <= 1)).all()):
            raise DataError(
                f"expected images in [0, 1] or bytes, got {self.images.dtype} from {self.images.min():g} to "
                f"{self.images.max():g}; undo the normalisation, and let the model normalise"
            )
        return (self.images * 255).round().to(torch.uint8)


@dataclass(frozen=True)
class GivenDataset:
    """A data set that was loaded or made by the caller."""

    dataset: Dataset

    def record(self) -> dict[str, str]:
        train, test = self.dataset.train, self.dataset.test
        parts = {"train": train.inputs, "train_labels": train.targets, "test": test.inputs, "test_labels": test.targets}
        return {"kind": self.dataset.name, "digest": digest(parts)}

    def load(self, root: Path) -> Dataset:
        """The data set; `root` is not used."""
        return self.dataset
