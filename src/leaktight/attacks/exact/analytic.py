"""Shared by attacks in closed form: the update as a gradient, and the first layer's input as pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leaktight.core.devices import CPU, moved
from leaktight.core.errors import ModelError, UsageError
from leaktight.core.protocols import Attack, require_seen
from leaktight.core.tensors import cloned, first_non_finite
from leaktight.core.types import Batch, Mode, Observation, Reconstruction
from leaktight.models.surgery import CONVOLUTIONS, layer_inputs, mode_of

LAYERS = (*CONVOLUTIONS, nn.Linear)


class Gradient(NamedTuple):
    """An update as a gradient by name, in float64. scaled: whether its length is known. notes: what was assumed."""

    tensors: dict[str, Tensor]
    scaled: bool
    notes: Sequence[str]

    def needed(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise UsageError(f"expected the gradient of {name!r}, got none: it was withheld; use an attack by search")
        return self.tensors[name]


def only(attack: Attack, seen: Sequence[Observation]) -> Observation:
    """The observation, if there is exactly one. It is moved to the CPU, where closed forms are solved in float64."""
    if len(seen) != 1:
        raise UsageError(f"expected one observation, got {len(seen)}; attack them one at a time")
    return moved(require_seen(attack, seen), CPU)


def gradient_of(seen: Observation) -> Gradient:
    """The update as a gradient; a model change is treated as one step of gradient descent."""
    update, local = seen.update, seen.local_training
    if (broken := first_non_finite(update.tensors)) is not None:
        raise UsageError(f"expected a finite update, got NaN or infinity in {broken!r}; it cannot be inverted")
    known = update.kind == "gradient" or local is not None
    factor = 1.0 if update.kind == "gradient" else -1.0 / (1.0 if local is None else local.learning_rate)
    tensors = {name: factor * tensor.detach().to("cpu", torch.float64) for name, tensor in update.tensors.items()}
    notes = [] if update.kind == "gradient" else ["one local step of plain gradient descent"]
    return Gradient(tensors, known, notes)


@dataclass(frozen=True)
class Entrance:
    """The first layer. Its input is shift + scale * pixels, element by element."""

    name: str
    layer: nn.Module
    shift: Tensor
    scale: Tensor

    def pixels(self, entered: Tensor) -> Tensor:
        """Images (N, C, H, W) from inputs of the layer (N, ...)."""
        return ((entered.reshape(len(entered), *self.shift.shape) - self.shift) / self.scale).clamp(0, 1)


def entrance(seen: Observation) -> Entrance:
    """Find the first layer and its shift and scale from three images; ModelError if pixels are mixed before it."""
    shape = seen.inputs.shape
    ramp = torch.linspace(1, 0, seen.inputs.size, dtype=torch.float64).reshape(shape)
    shown = [entered(seen, image[None]) for image in (torch.zeros_like(ramp), torch.ones_like(ramp), ramp)]
    first = next(iter(shown[0]))
    size = shown[0][first].numel()
    if size != ramp.numel():
        raise ModelError(
            f"expected the first layer {first!r} to have {ramp.numel()} inputs, one per pixel, got {size}; use a search"
        )
    zero, one, middle = (each[first].reshape(shape) for each in shown)
    found = Entrance(first, seen.model.get_submodule(first), zero, one - zero)
    if not torch.allclose(found.pixels(middle[None])[0], ramp, atol=1e-9):
        raise ModelError(f"expected pixels to reach the layer {first!r} one by one, got a mixture; use a search")
    return found


def entered(seen: Observation, images: Tensor, mode: Mode = "eval") -> dict[str, Tensor]:
    """The input of each convolution and linear layer by name, in the order in which they run, in float64."""
    tensors = cloned(precise(seen))  # batch norm may write to its statistics
    with torch.no_grad(), mode_of(seen.model, mode), torch.random.fork_rng(devices=[]):
        found = dict(layer_inputs(seen.model, tensors, {}, images.double(), LAYERS))
    if not found:
        raise ModelError("expected a model with a convolution or a linear layer, got none; choose another model")
    return found


def precise(seen: Observation) -> dict[str, Tensor]:
    """All tensors of the model that was sent, by name, floating-point ones in float64."""
    tensors = {**dict(seen.model.named_parameters()), **seen.broadcast.buffers, **seen.broadcast.params}
    return {
        name: tensor.detach().double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }


def answer(images: Tensor, labels: Tensor, loss: float, notes: dict[str, object]) -> Reconstruction:
    """A `Reconstruction` of these images, clamped to [0, 1], with their labels."""
    guess = images.nan_to_num(0.5, 1.0, 0.0).clamp(0, 1).to(torch.float32)
    return Reconstruction(Batch(guess, labels), loss, notes, first_loss=loss)
