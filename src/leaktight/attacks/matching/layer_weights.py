"""How much each layer counts when gradients are compared: the six functions of AGIC's Table I, and none.

Reference: Xu et al., AGIC: Approximate Gradient Inversion Attack on Federated Learning, SRDS 2022, section IV-C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from leaktight.core.types import Params
from leaktight.models.surgery import conv_bn_blocks, layers_in_order

Weighting: TypeAlias = Literal[
    "equal",
    "decrease_log",
    "decrease_exp",
    "decrease_linear",
    "increase_exp",
    "increase_log",
    "increase_linear",
]


class Curve(NamedTuple):
    """A function of Table I: how far layer i of N has come from the first weight to the last, and what the last is.

    share: (i, N) to [0, 1], 0 for i = 1 and 1 for i = N. last: the weight of layer N, from beta.
    """

    share: Callable[[int, int], float]
    last: Callable[[float], float]


def _linear(place: int, count: int) -> float:
    return (place - 1) / (count - 1)


def _log(place: int, count: int) -> float:
    return math.log(place) / math.log(count)


def _exp(place: int, count: int) -> float:
    # Divided by e^N above and below, so that a deep network does not overflow.
    return (math.exp(place - count) - math.exp(1 - count)) / (1 - math.exp(1 - count))


def _one(beta: float) -> float:
    return 1.0


def _rises(beta: float) -> float:
    return beta


def _falls(beta: float) -> float:
    return 1 / beta


WEIGHTINGS: Mapping[str, Curve] = {
    "equal": Curve(_linear, _one),
    "decrease_log": Curve(_log, _falls),
    "decrease_exp": Curve(_exp, _falls),
    "decrease_linear": Curve(_linear, _falls),
    "increase_exp": Curve(_exp, _rises),
    "increase_log": Curve(_log, _rises),
    "increase_linear": Curve(_linear, _rises),
}
"""In the order of Table I. All start at 1; the increasing ones end at beta, the decreasing ones at 1 / beta, which for
the table's beta = 2 are its 2 and 0.5."""


def curve_weights(weighting: str, beta: float, count: int) -> list[float]:
    """The weights l_1 ... l_N of `count` layers; a single layer has weight 1.

    >>> curve_weights("increase_linear", 3.0, 3)
    [1.0, 2.0, 3.0]
    """
    curve = WEIGHTINGS[weighting]
    if count == 1:
        return [1.0]
    return [1 + (curve.last(beta) - 1) * curve.share(place, count) for place in range(1, count + 1)]


def counted_layers(model: nn.Module, shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    """The layers that get a weight of their own, first to last in the order in which they run on a blank image.

    Each is the names of a convolution, projections included, and of the batch norm that follows it. A network without
    convolutions has its linear layers counted instead, the last one too.
    """
    example = next(model.parameters(), torch.zeros(()))
    blank = torch.zeros(1, *shape, dtype=example.dtype, device=example.device)
    blocks = conv_bn_blocks(model, blank)
    if blocks:
        return [tuple(name for name in block if name is not None) for block in blocks]
    return [(name,) for name, _ in layers_in_order(model, (nn.Linear,), blank)]


def layer_weights(
    model: nn.Module, shape: tuple[int, ...], target: Params, *, weighting: str, beta: float, relu_modifier: bool
) -> dict[str, float]:
    """The weight of every tensor of `target`: alpha of the layer that it belongs to (Eq. 7 and 8).

    relu_modifier: divide a counted layer's weight by the share of its gradient (without the batch norm's) that is not
    exactly zero. A gradient that is zero throughout keeps its weight, as there is nothing to make up for.
    Tensors outside the counted layers (linear layers, and norms of other kinds) take the mean of l_i.
    """
    layers = counted_layers(model, shape)
    curve = curve_weights(weighting, beta, max(len(layers), 1))
    weights = dict.fromkeys(target, sum(curve) / len(curve))
    for names, weight in zip(layers, curve, strict=False):
        own, *_ = members = [_parameters(target, name) for name in names]
        modifier = _modifier([target[name] for name in own]) if relu_modifier else 1.0
        weights.update({name: weight * modifier for group in members for name in group})
    return weights


def _parameters(target: Params, layer: str) -> list[str]:
    prefix = f"{layer}." if layer else ""
    return [name for name in target if name.startswith(prefix)]


def _modifier(gradients: list[Tensor]) -> float:
    """1 / (1 - p), where p is the share of exact zeros."""
    total = sum(gradient.numel() for gradient in gradients)
    nonzero = sum(int(torch.count_nonzero(gradient)) for gradient in gradients)
    return total / nonzero if nonzero else 1.0
