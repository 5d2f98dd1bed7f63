"""The weight of each layer in the comparison of gradients: the six functions of AGIC's Table I, and "equal".

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
    """A function of Table I. The weight of layer i of N is 1 + (last(beta) - 1) share(i, N).

    share: from 0 for i = 1 to 1 for i = N. last: the weight of layer N.
    """

    share: Callable[[int, int], float]
    last: Callable[[float], float]


def _linear(layer: int, count: int) -> float:
    return (layer - 1) / (count - 1)


def _log(layer: int, count: int) -> float:
    return math.log(layer) / math.log(count)


def _exp(layer: int, count: int) -> float:
    # Numerator and denominator are divided by e^N, so that a deep network does not overflow.
    return (math.exp(layer - count) - math.exp(1 - count)) / (1 - math.exp(1 - count))


WEIGHTINGS: Mapping[str, Curve] = {
    "equal": Curve(_linear, lambda beta: 1.0),
    "decrease_log": Curve(_log, lambda beta: 1 / beta),
    "decrease_exp": Curve(_exp, lambda beta: 1 / beta),
    "decrease_linear": Curve(_linear, lambda beta: 1 / beta),
    "increase_exp": Curve(_exp, lambda beta: beta),
    "increase_log": Curve(_log, lambda beta: beta),
    "increase_linear": Curve(_linear, lambda beta: beta),
}
"""In the order of Table I, whose beta is 2."""


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
    """The layers that get their own weight, in the order in which they run.

    Each is the names of a convolution (projections included) and of the batch norm after it. In a network without
    convolutions they are the linear layers, including the last.
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
    """The weight of every tensor of `target`: alpha of its layer (Eq. 7 and 8).

    relu_modifier: divide a counted layer's weight by the fraction of its gradient (without the batch norm's) that is
    not exactly zero; a gradient of zeros keeps its weight.
    Tensors outside the counted layers (linear layers, other norms) get the mean weight.
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
    """1 / (1 - p), with p the fraction of exact zeros."""
    total = sum(gradient.numel() for gradient in gradients)
    nonzero = sum(int(torch.count_nonzero(gradient)) for gradient in gradients)
    return total / nonzero if nonzero else 1.0
