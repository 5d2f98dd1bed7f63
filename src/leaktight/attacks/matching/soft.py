"""Smooth layers in guesses: where a network has kinks, a search that goes around them first gets further.

The second derivative of a ReLU is zero, so that a search does not see how a pixel switches units on and off, nor, with
max-pooling, how another one becomes the largest of its window. A smooth layer shows both. Its temperature falls during
the search.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaktight.attacks.matching.view import Around, Matched, View
from leaktight.core.inputs import Inputs
from leaktight.core.rng import Rng
from leaktight.core.types import Observation
from leaktight.models.source import require_choice
from leaktight.models.surgery import layer_inputs, mode_of

Layers: TypeAlias = Literal["max-pooling", "relu"]

_FALL: Mapping[Layers, float] = {"max-pooling": 100, "relu": 15}  # first temperature / last
_NOISE = 4  # images that show the sizes of values in a network
_ABSENT = -1e4  # value of padding; its weight is zero


@dataclass(frozen=True, kw_only=True)
class Softened(Around):
    """Match as `inner` does, with smooth layers in guesses.

    layers: the kind that is softened, where a network has it as a module. A ReLU that writes in place stays, as others
    may read what it wrote.
    first, last: the temperatures at the start and the end of the search, 0 < last <= first; those of a ReLU in units of
    the root mean square of what enters it when images are noise. The observed update is not changed, so the match is
    exact only at low temperature. A search without a schedule (L-BFGS) is at the last one.
    """

    layers: Layers = "max-pooling"
    first: float = 0.1
    last: float = 5e-4

    def __post_init__(self) -> None:
        require_choice("layers", self.layers, _SOFT)
        if not 0 < self.last <= self.first:
            raise ValueError(f"expected 0 < last <= first, got first {self.first} and last {self.last}")

    def changed(self, view: View, seen: Observation) -> View:
        model = copy.deepcopy(view.trainer.model)
        soft: list[str] = []
        for prefix, parent in list(model.named_modules()):
            for own, layer in list(parent._modules.items()):  # `named_children` leaves out a layer's second place
                smooth = None if layer is None else _SOFT[self.layers](layer, self.last)
                if smooth is not None:
                    setattr(parent, own, smooth)
                    soft.append(f"{prefix}.{own}".removeprefix("."))
        if not soft:
            return replace(view, notes=(*view.notes, f"no {self.layers} to soften")) if self.layers == "relu" else view
        like = next(iter(view.params.values()))
        smooth_view = replace(view, trainer=replace(view.trainer, model=model))
        units = _sizes(smooth_view, soft, seen.inputs) if self.layers == "relu" else dict.fromkeys(soft, 1.0)
        buffers = {f"{name}.temperature": like.new_tensor(self.last * unit) for name, unit in units.items()}
        moving = {f"{name}.temperature": (self.first * unit, self.last * unit) for name, unit in units.items()}
        return replace(
            smooth_view,
            buffers={**view.buffers, **buffers},
            annealed={**view.annealed, **moving},
            notes=(*view.notes, f"{self.layers} of guesses is softened"),
        )


def _sizes(view: View, names: Iterable[str], inputs: Inputs) -> dict[str, float]:
    """The root mean square of what enters each of these soft ReLUs, on images of noise; 1 where nothing or zeros do."""
    like = next(iter(view.params.values()))
    images = torch.rand(inputs.blank(_NOISE, like).shape, generator=Rng(0).public()).to(like)
    model = view.trainer.model
    with torch.no_grad(), mode_of(model, view.trainer.mode):
        entered = dict(layer_inputs(model, view.params, view.buffers, images, (SoftRelu,)))
    sizes = {name: float(values.square().mean().sqrt()) for name, values in entered.items()}
    return {name: sizes.get(name) or 1.0 for name in names}


def softened(inner: Matched, layers: Layers, first: float) -> Matched:
    """Match as `inner` does, with smooth layers from this temperature on; 0: as it does."""
    return Softened(inner=inner, layers=layers, first=first, last=first / _FALL[layers]) if first else inner


def soft_relu(value: Tensor, temperature: Tensor) -> Tensor:
    """Smooth, and a ReLU at temperature 0.

    >>> soft_relu(torch.tensor([-1.0, 0.0, 1.0]), torch.tensor(0.01))
    tensor([0.0000, 0.0069, 1.0000])
    """
    return temperature * F.softplus(value / temperature)


class SoftRelu(nn.Module):
    """A ReLU in the limit of temperature 0."""

    temperature: Tensor

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(temperature))

    def forward(self, inputs: Tensor) -> Tensor:
        return soft_relu(inputs, self.temperature)


def _soft_relu_for(layer: nn.Module, temperature: float) -> nn.Module | None:
    return SoftRelu(temperature) if type(layer) is nn.ReLU and not layer.inplace else None


def _soft_pool_for(layer: nn.Module, temperature: float) -> nn.Module | None:
    if not isinstance(layer, nn.MaxPool2d) or layer.ceil_mode or layer.return_indices:
        return None
    return SoftPool(layer, temperature)


class SoftPool(nn.Module):
    """The mean of a window's values weighted by exp(value / temperature); the maximum as temperature goes to 0."""

    temperature: Tensor

    def __init__(self, pool: nn.MaxPool2d, temperature: float) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding, self.dilation = (
            _pair(setting) for setting in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
        )
        self.register_buffer("temperature", torch.tensor(temperature))

    def forward(self, inputs: Tensor) -> Tensor:
        if any(self.padding):
            rows, columns = self.padding
            inputs = nn.functional.pad(inputs, (columns, columns, rows, rows), value=_ABSENT)
        sizes = [
            (length - dilation * (kernel - 1) - 1) // stride + 1
            for length, kernel, stride, dilation in zip(
                inputs.shape[-2:], self.kernel, self.stride, self.dilation, strict=True
            )
        ]
        windows = torch.stack([self._shifted(inputs, place, sizes) for place in product(*map(range, self.kernel))], -1)
        return ((windows / self.temperature).softmax(-1) * windows).sum(-1)

    def _shifted(self, inputs: Tensor, place: tuple[int, ...], sizes: list[int]) -> Tensor:
        """The value at one position of every window."""
        rows, columns = (
            slice(dilation * offset, dilation * offset + stride * (size - 1) + 1, stride)
            for offset, stride, dilation, size in zip(place, self.stride, self.dilation, sizes, strict=True)
        )
        return inputs[..., rows, columns]


def _pair(setting: int | tuple[int, int]) -> tuple[int, int]:
    return (setting, setting) if isinstance(setting, int) else (setting[0], setting[1])


_SOFT: Mapping[Layers, Callable[[nn.Module, float], nn.Module | None]] = {
    "max-pooling": _soft_pool_for,
    "relu": _soft_relu_for,
}
