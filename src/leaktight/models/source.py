"""The settings that networks share, the normalisation of inputs, and the check that a network fits the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from leaktight.core.errors import ModelError, suggestion
from leaktight.core.inputs import Images, Inputs
from leaktight.core.tasks import Classification, Penalised, Task
from leaktight.core.text import as_written, sides
from leaktight.models.surgery import mode_of

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Activation: TypeAlias = Literal["relu", "sigmoid"]

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}
"""Leakage studies replace every ReLU by a sigmoid, because its second derivative is not zero."""


@runtime_checkable
class ModelSource(Protocol):
    """Settings of a network. `build` draws the initial weights from PyTorch's global generator.

    Call it through `build_model`, which seeds and restores that generator.
    """

    def build(self, inputs: Inputs, num_classes: int) -> nn.Module: ...


@dataclass(frozen=True, kw_only=True)
class Network(ABC):
    """Settings of a network of the catalogue.

    mean, std: inputs become (x - mean) / std; one number per channel, or one for all; empty is no normalisation.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError(f"expected as many numbers in mean as in std, got {len(self.mean)} and {len(self.std)}")
        if any(value <= 0 for value in self.std):
            raise ValueError(f"expected std > 0, got {as_written(self.std)}")

    def build(self, inputs: Inputs, num_classes: int) -> nn.Module:
        """The network for such inputs, with fresh weights. Networks of the catalogue take images."""
        return self.network(Images.require(type(self).__name__, inputs), num_classes)

    @abstractmethod
    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        """The network itself."""

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

    Mean and std are numbers, not buffers, so that published weights load by name and tracing finds no other tensors.
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


def reason(error: BaseException) -> str:
    """The first line of another library's error, to quote in one of ours."""
    return (str(error) or type(error).__name__).strip().splitlines()[0]


def num_features(features: nn.Module, inputs: Images) -> int:
    """The number of outputs per image, by a run on one blank image.

    Only for layers without batch statistics, which a run would update.
    """
    with torch.no_grad():
        try:
            outputs: Tensor = features(inputs.blank(1, torch.zeros(())))
        except RuntimeError as error:
            raise ModelError(
                f"expected larger images for this network, got {inputs.height}x{inputs.width}: {reason(error)}; "
                "choose another model or scale the images up"
            ) from error
    return outputs.numel()


def check_fits(model: nn.Module, inputs: Inputs, num_classes: int, task: Task = Classification()) -> None:
    """Raise ModelError unless the model maps two such examples to outputs of the shape that the task needs."""
    examples = f"{inputs.kind} of {inputs}"
    example = next(model.parameters(), torch.zeros(()))
    with torch.no_grad(), mode_of(model, "eval"):
        try:
            outputs = model(inputs.blank(2, example))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(
                f"expected a model that takes {examples}, got an error: {reason(error)}; choose another model or size"
            ) from error
    plain = outputs.outputs if isinstance(outputs, Penalised) else outputs
    if not isinstance(plain, Tensor):
        raise ModelError(f"expected the model to return a tensor, got {type(plain).__name__}; return only the logits")
    got = tuple(plain.shape)
    wanted = 2, *task.output_shape(got, num_classes)[1:]
    if got != wanted:
        raise ModelError(
            f"expected outputs {sides(wanted)} for two {examples}, got {sides(got)}; "
            f"choose a model for this task, built for {num_classes} classes"
        )
