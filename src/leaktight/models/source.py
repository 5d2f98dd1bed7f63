"""The settings that networks share, the normalisation of inputs, and the check that a network fits the data."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from leaktight.core.errors import ModelError, OutOfScopeError, suggestion
from leaktight.core.inputs import Images, Inputs
from leaktight.core.rng import Rng, global_seed
from leaktight.core.scope import not_supported
from leaktight.core.tasks import Classification, Penalised, Task
from leaktight.core.text import sides
from leaktight.core.types import Mode
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
        check_normalisation(self.mean, self.std)

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
        try:
            check_normalisation(self.mean, self.std, channels)
        except ValueError as error:
            raise ModelError(str(error)) from error
        return Normalize(self.mean, self.std)


def check_normalisation(mean: Sequence[float], std: Sequence[float], channels: int | None = None) -> None:
    """Raise ValueError unless mean and std belong together and, if `channels` is given, fit so many channels."""
    if bool(mean) != bool(std):
        given, absent = ("mean", "std") if mean else ("std", "mean")
        raise ValueError(f"expected mean and std together, got a {given} alone; give a {absent} too")
    if len(mean) != len(std):
        raise ValueError(f"expected as many numbers in mean as in std, got {len(mean)} and {len(std)}")
    if channels is not None and len(mean) not in (0, 1, channels):
        kind = "grey images" if channels == 1 else f"images of {channels} channels"
        number = "1 number" if channels == 1 else f"1 or {channels} numbers"
        raise ValueError(f"expected mean and std of {number} for {kind}, got {len(mean)}; give one number per channel")
    if any(not value > 0 for value in std):
        raise ValueError(f"expected std > 0, got {', '.join(f'{value:g}' for value in std)}")


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


def check_fits(
    model: nn.Module, inputs: Inputs, num_classes: int, task: Task = Classification(), *, mode: Mode = "eval"
) -> None:
    """Raise ModelError unless the model maps two such examples to outputs of the shape that the task needs.

    mode: in which it is trained. The model is the same afterwards.
    """
    _check_outputs(model, inputs, num_classes, task)
    if mode == "train":
        try:
            _check_outputs(copy.deepcopy(model), inputs, num_classes, task, "train")
        except OutOfScopeError:
            raise
        except ModelError as error:
            raise ModelError(f"in training mode: {error}; or train it in evaluation mode (model.mode=eval)") from error


def outputs_of(model: nn.Module, inputs: Inputs, mode: Mode = "eval") -> object:
    """What the model makes of two blank examples, without a penalty; ModelError if it fails on them."""
    example = next(model.parameters(), torch.zeros(()))
    with torch.no_grad(), mode_of(model, mode), global_seed(Rng(0).child("check")):
        try:
            outputs = model(inputs.blank(2, example))
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            embeds = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
            if embeds and "indices" in str(error):  # pixels are no indices; a network may also embed positions
                raise OutOfScopeError(not_supported("tokens (the model embeds them)")) from error
            raise cannot_take(f"{inputs.kind} of {inputs}", error) from error
    return outputs.outputs if isinstance(outputs, Penalised) else outputs


def _check_outputs(model: nn.Module, inputs: Inputs, num_classes: int, task: Task, mode: Mode = "eval") -> None:
    plain = outputs_of(model, inputs, mode)
    if not isinstance(plain, Tensor):
        raise _no_tensor(plain)
    got = tuple(plain.shape)
    wanted = 2, *task.output_shape(got, num_classes)[1:]
    if got == wanted:
        return
    if (outside := task.outside_outputs(got)) is not None:
        raise OutOfScopeError(outside)
    if len(got) == len(wanted) == 2:
        raise ModelError(f"expected a model with {wanted[1]} outputs, got {got[1]}; build it for {num_classes} classes")
    raise ModelError(
        f"expected outputs of shape {sides(wanted)} for two {inputs.kind} of {inputs}, got {sides(got)}; choose a "
        f"model for this task, built for {num_classes} classes"
    )


def cannot_take(examples: str, error: Exception) -> ModelError:
    """The error for a model that fails on examples that are called so."""
    return ModelError(
        f"expected a model that takes {examples}, got an error: {reason(error)}; choose another model or size"
    )


def _no_tensor(outputs: object) -> ModelError:
    """The error for outputs that are no tensor: those of detection and segmentation, or logits among others."""
    items = [outputs, *(outputs if isinstance(outputs, list | tuple) else [])]
    names = {str(name) for item in items if isinstance(item, Mapping) for name in item}
    if "boxes" in names:
        return OutOfScopeError(not_supported("detection (the model returns boxes)"))
    if "out" in names or "masks" in names:
        return OutOfScopeError(not_supported("segmentation (the model returns maps of classes)"))
    among = f" of {', '.join(sorted(names))}" if names else ""
    got = f"a {type(outputs).__name__}{among}"
    return ModelError(f"expected the model to return a tensor, got {got}; return only the logits")
