"""Dropout in a captured update: its masks, read from the update, or how much of a difference they make."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from leaktight.core.types import Observation
from leaktight.models.surgery import CONVOLUTIONS, layer_inputs, mode_of


class Masked(nn.Module):
    """Dropout with a known mask. kept: 1 where a value is kept, else 0, for one example. rate: of dropped values."""

    def __init__(self, kept: Tensor, rate: float) -> None:
        super().__init__()
        self.kept, self.rate = kept, rate

    def forward(self, values: Tensor) -> Tensor:
        return values * self.kept.to(values) / (1 - self.rate)


def dropouts(model: nn.Module) -> dict[str, _DropoutNd]:
    """The layers that drop something, by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, _DropoutNd) and 0 < each.p < 1}


def with_masks(seen: Observation) -> Observation | None:
    """The observation with the masks of dropout as its update shows them; None if it does not show them all.

    A value that was dropped leaves a column of zeros in the update of the next linear layer, a channel one in that of
    the next convolution. A value that was zero anyway does so, too, which makes no difference.
    Assumes: one example and one local step.
    """
    if seen.batch_size != 1 or seen.num_steps not in (None, 1):
        return None
    layers = dropouts(seen.model)
    kept = _masks(seen, layers)
    if not layers or any(name not in kept or not _plausible(kept[name], layer.p) for name, layer in layers.items()):
        return None
    model = copy.deepcopy(seen.model)
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Masked(kept[name], layer.p))
    return replace(seen, model=model)


def _masks(seen: Observation, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The masks that can be read, by the name of the layer."""
    blank = seen.inputs.blank(1, next(seen.model.parameters()))
    kinds = (_DropoutNd, nn.Linear, *CONVOLUTIONS)
    with torch.no_grad(), mode_of(seen.model, "eval"):
        ran = layer_inputs(seen.model, seen.broadcast.params, seen.broadcast.buffers, blank, kinds)
    found: dict[str, Tensor] = {}
    for (name, dropped), (after, entered) in pairwise(ran):
        weight = seen.update.tensors.get(f"{after}.weight" if after else "weight")
        if name not in layers or weight is None:
            continue
        used = weight.transpose(0, 1).flatten(1).any(1)
        if isinstance(seen.model.get_submodule(after), nn.Linear) and entered.numel() == dropped.numel() == len(used):
            found[name] = used.reshape(dropped.shape[1:])
        elif len(used) == dropped.shape[1] == entered.shape[1] and not isinstance(layers[name], nn.Dropout):
            found[name] = used.reshape(-1, *(1 for _ in dropped.shape[2:]))
    return found


def _plausible(kept: Tensor, rate: float) -> bool:
    """Whether enough values are missing: noise in an update hides a mask. Four standard deviations are allowed."""
    spread = math.sqrt(kept.numel() * rate * (1 - rate))
    return int((~kept).sum()) >= kept.numel() * rate - 4 * spread
