"""What every victim network shares: its settings, the normalisation inside it, and the check that it fits the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from leaktight.core.errors import ModelError, suggestion
from leaktight.core.tasks import Classification, Penalised, Task, WordRecognition
from leaktight.core.types import ImageShape
from leaktight.models.surgery import mode_of

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Activation: TypeAlias = Literal["relu", "sigmoid"]

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}
"""Sigmoid is what leakage studies put in place of every ReLU: it is smooth, so second derivatives carry information."""


@runtime_checkable
class ModelSource(Protocol):
    """Settings that name a network. `build` draws the initial weights from PyTorch's global generator.

    Call it through `build_model`, which seeds that generator and restores it.
    """

    def build(self, shape: ImageShape, num_classes: int) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class Network(ABC):
    """Settings of a network of the catalogue.

    mean, std: the input is (x - mean) / std; one number per channel, or one for all. Empty: no normalisation.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError(f"expected as many numbers in mean as in std, got {len(self.mean)} and {len(self.std)}")
        if any(value <= 0 for value in self.std):
            raise ValueError(f"expected std > 0, got {self.std}")

    @abstractmethod
    def build(self, shape: ImageShape, num_classes: int) -> nn.Module:
        """The network for images of `shape`, with fresh weights."""

    def normalizer(self, channels: int) -> nn.Module:
        """The first layer of the network."""
        if not self.mean:
            return nn.Identity()
        if len(self.mean) not in (1, channels):
            raise ModelError(
                f"expected mean and std of 1 or {channels} numbers for images of {channels} channels, "
                f"got {len(self.mean)}; give one number per channel"
            )
        return Normalize(self.mean, self.std)


class Normalize(nn.Module):
    """(x - mean) / std per channel.

    The two are plain numbers, not buffers: they are no part of the model's state, so published weights load by name,
    and a tracer meets no tensor that it was not given.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean = tuple(mean)
        self.std = tuple(std)

    def forward(self, inputs: Tensor) -> Tensor:
        mean, std = (
            torch.tensor(values, dtype=inputs.dtype, device=inputs.device).view(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return (inputs - mean) / std


def require_choice(name: str, value: str, valid: Collection[str]) -> None:
    """Raise ValueError unless the setting `name` has one of the `valid` values."""
    if value not in valid:
        raise ValueError(f"expected {name} to be one of {', '.join(valid)}, got {value!r}; {suggestion(value, valid)}")


def require_positive(**settings: int) -> None:
    """Raise ValueError unless all these settings are at least 1."""
    for name, value in settings.items():
        if value < 1:
            raise ValueError(f"expected {name} >= 1, got {value}")


def reason(error: BaseException) -> str:
    """The first line of another library's error, to quote in one of ours."""
    return (str(error) or type(error).__name__).strip().splitlines()[0]


def num_features(features: nn.Module, shape: ImageShape) -> int:
    """How many numbers per image the layers give, found by running them on one blank image.

    Only for layers without batch statistics, which this would update.
    """
    with torch.no_grad():
        try:
            outputs: Tensor = features(torch.zeros(1, *shape))
        except RuntimeError as error:
            raise ModelError(
                f"expected larger images for this network, got {shape.height}x{shape.width}: {reason(error)}; "
                "choose another model or scale the images up"
            ) from None
    return outputs.numel()


def check_fits(model: nn.Module, shape: ImageShape, num_classes: int, task: Task | None = None) -> None:
    """Raise ModelError unless the model takes two images of `shape` and answers as the task expects.

    Classification (also None) expects (2, num_classes), words (2, T, characters and blank), other tasks two rows.
    """
    images = f"images of {shape.channels}x{shape.height}x{shape.width}"
    example = next(model.parameters(), torch.zeros(()))
    with torch.no_grad(), mode_of(model, "eval"):
        try:
            outputs = model(torch.zeros(2, *shape, dtype=example.dtype, device=example.device))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(
                f"expected a model that takes {images}, got an error: {reason(error)}; choose another model or size"
            ) from error
    plain = outputs.outputs if isinstance(outputs, Penalised) else outputs
    if not isinstance(plain, Tensor):
        raise ModelError(f"expected the model to return a tensor, got {type(plain).__name__}; return the logits alone")
    got = tuple(plain.shape)
    wanted = _expected_shape(task, num_classes, got)
    if got != wanted:
        raise ModelError(
            f"expected outputs {wanted} for two {images}, got {got}; choose a model for this task, built for "
            f"{num_classes} classes"
        )


def _expected_shape(task: Task | None, num_classes: int, got: tuple[int, ...]) -> tuple[int, ...]:
    """The shape for a batch of 2; where the task leaves a size open, the one that was got."""
    match task:
        case None | Classification():
            return 2, num_classes
        case WordRecognition():
            return 2, got[1] if len(got) == 3 else 1, task.blank + 1
    return 2, *got[1:]
