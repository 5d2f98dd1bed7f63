"""Soft max-pooling for an attacker's guesses.

The gradient of max-pooling jumps when another pixel becomes the largest, and a search that matches gradients gets stuck
between such jumps. With a mean weighted by exp(x / temperature) in place of the maximum the loss is smooth. The
temperature falls during the search.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from leaktight.attacks.matching.view import Around, View
from leaktight.core.types import Observation

_ABSENT = -1e4  # value of padding; its weight is zero


@dataclass(frozen=True, kw_only=True)
class Softened(Around):
    """Match as `inner` does, with soft max-pooling in guesses.

    first, last: the temperatures at the start and the end of the search, 0 < last <= first. The observed update is not
    changed, so the match is exact only at low temperature. Networks without max-pooling are not changed.
    """

    first: float = 0.1
    last: float = 5e-4

    def __post_init__(self) -> None:
        if not 0 < self.last <= self.first:
            raise ValueError(f"expected 0 < last <= first, got first {self.first} and last {self.last}")

    def changed(self, view: View, seen: Observation) -> View:
        names = [name for name, module in view.trainer.model.named_modules() if _can_be_soft(module)]
        if not names:
            return view
        model = copy.deepcopy(view.trainer.model)
        for name in names:
            parent, _, own = name.rpartition(".")
            pool = model.get_submodule(name)
            assert isinstance(pool, nn.MaxPool2d)
            setattr(model.get_submodule(parent), own, SoftPool(pool, self.last))
        buffers = {f"{name}.temperature": torch.tensor(self.last, dtype=view.precision) for name in names}
        return replace(
            view,
            trainer=replace(view.trainer, model=model),
            buffers={**view.buffers, **buffers},
            annealed=dict.fromkeys(buffers, (self.first, self.last)),
            notes=(*view.notes, "max-pooling of guesses is softened"),
        )


def _can_be_soft(module: nn.Module) -> bool:
    return isinstance(module, nn.MaxPool2d) and not module.ceil_mode and not module.return_indices


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
