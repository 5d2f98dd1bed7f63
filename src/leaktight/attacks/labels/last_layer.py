"""The base of label strategies, and the gradient of the last linear layer, from which labels are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from leaktight.core.errors import ModelError, UsageError
from leaktight.core.protocols import LabelSource
from leaktight.core.rng import Rng
from leaktight.core.tensors import first_non_finite
from leaktight.core.text import sides
from leaktight.core.threat import Knowledge
from leaktight.core.types import Observation
from leaktight.models.surgery import final_linear

_OTHERWISE = "disclose the labels and use given, or search for them with joint"


@dataclass(frozen=True, kw_only=True)
class LabelStrategy(ABC):
    """Finds the labels before the search for images.

    source: "given" or "inferred". ordered: whether labels come in the order of the client's steps.
    """

    requires: ClassVar[frozenset[Knowledge]] = frozenset()
    source: ClassVar[LabelSource] = "inferred"
    ordered: ClassVar[bool] = False

    @abstractmethod
    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        """The labels of `num_examples` examples, (N,); sorted unless `ordered`."""


class HeadGradient(NamedTuple):
    """The gradient of the last linear layer in float64, up to a positive factor.

    name, layer: of the layer. weight (C, F), bias (C,): the gradients; None if withheld.
    """

    name: str
    layer: nn.Linear
    weight: Tensor | None
    bias: Tensor | None

    def name_of(self, part: str) -> str:
        return f"{self.name}.{part}" if self.name else part

    def needed_weight(self) -> Tensor:
        if self.weight is None:
            raise UsageError(
                f"expected the gradient of {self.name_of('weight')!r}, got none: it was withheld; {_OTHERWISE}"
            )
        return self.weight

    def needed_bias(self) -> Tensor:
        if self.layer.bias is None:
            raise ModelError(f"expected a bias in the last layer {self.name!r}, got none; use wainakh or geng")
        if self.bias is None:
            raise UsageError(
                f"expected the gradient of {self.name_of('bias')!r}, got none: it was withheld; {_OTHERWISE}"
            )
        return self.bias

    def row_sums(self) -> Tensor:
        return self.needed_weight().sum(1)


def head_gradient(seen: Observation) -> HeadGradient:
    """The gradient of the last linear layer; an error if there is no such layer or the update is invalid."""
    if not seen.task.one_class:
        raise UsageError(f"expected a classification for label rules, got {type(seen.task).__name__}; {_OTHERWISE}")
    if (bad := first_non_finite(seen.update.tensors)) is not None:
        raise UsageError(f"expected finite numbers in the update, got NaN or infinity in {bad!r}; it has no labels")
    name, layer = _last_layer(seen)
    sign = -1.0 if seen.update.kind == "delta" else 1.0
    found: dict[str, Tensor | None] = {}
    for part, parameter in (("weight", layer.weight), ("bias", layer.bias)):
        tensor = seen.update.tensors.get(f"{name}.{part}" if name else part)
        if tensor is not None and tensor.shape != parameter.shape:
            raise UsageError(
                f"expected '{name}.{part}' of shape {sides(parameter.shape)}, got {sides(tensor.shape)}; "
                "the update is of another model"
            )
        found[part] = None if tensor is None else sign * tensor.detach().to("cpu", torch.float64)
    return HeadGradient(name, layer, found["weight"], found["bias"])


def _last_layer(seen: Observation) -> tuple[str, nn.Linear]:
    kind = type(seen.model).__name__
    example = next(seen.model.parameters(), torch.zeros(()))
    try:
        name, layer = final_linear(seen.model, seen.inputs.blank(1, example))
    except ModelError:
        raise ModelError(
            f"expected a model that ends in a linear layer, got {kind} without one; {_OTHERWISE}"
        ) from None
    if layer.out_features != seen.num_classes:
        raise ModelError(
            f"expected a model that ends in a linear layer of {seen.num_classes} outputs, got {kind} "
            f"with {layer.out_features} in {name!r}; {_OTHERWISE}"
        )
    return name, layer


def check_count(num_examples: int) -> None:
    if num_examples < 1:
        raise UsageError(f"expected at least 1 example, got {num_examples}")


def labels_of(counts: Tensor) -> Tensor:
    """Sorted labels (N,) from the count of each class (C,).

    >>> labels_of(torch.tensor([2, 0, 1]))
    tensor([0, 0, 2])
    """
    return torch.arange(len(counts)).repeat_interleave(counts)
