"""A network as a plain chain: layers with weights, each followed by an invertible activation or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from leaktight.attacks.exact.analytic import precise
from leaktight.core.errors import ModelError
from leaktight.core.types import Observation
from leaktight.models.source import Normalize
from leaktight.models.surgery import mode_of


@dataclass(frozen=True)
class Link:
    """A convolution or linear layer and its activation. Shapes are for one example; weights are those sent."""

    name: str
    layer: nn.Conv2d | nn.Linear
    weight: Tensor
    bias: Tensor
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    activation: nn.Module | None = None


@dataclass(frozen=True)
class Inverse:
    """The inverse of an activation. undo: from its output, its input and a mask of where that is known.

    slope: its derivative as a function of its output.
    """

    undo: Callable[[Tensor], tuple[Tensor, Tensor]]
    slope: Callable[[Tensor], Tensor]


def _everywhere(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor, torch.ones_like(tensor, dtype=torch.bool)


def _leaky(activation: Any) -> Inverse:
    slope = float(activation.negative_slope)
    return Inverse(
        lambda output: _everywhere(torch.where(output < 0, output / slope, output)),
        lambda output: torch.where(output < 0, slope, 1.0).to(output.dtype),
    )


_INVERSES: Mapping[type[nn.Module], Callable[[Any], Inverse]] = {
    nn.LeakyReLU: _leaky,
    nn.ReLU: lambda activation: Inverse(
        lambda output: (output, output > 0), lambda output: (output > 0).to(output.dtype)
    ),
    nn.Sigmoid: lambda activation: Inverse(
        lambda output: _everywhere(output.clamp(1e-12, 1 - 1e-12).logit()), lambda output: output * (1 - output)
    ),
    nn.Tanh: lambda activation: Inverse(
        lambda output: _everywhere(output.clamp(1e-12 - 1, 1 - 1e-12).atanh()), lambda output: 1 - output.square()
    ),
}
_NOTHING = Inverse(_everywhere, torch.ones_like)
_PASSED = (nn.Identity, nn.Flatten, nn.Dropout, Normalize)


def activation_of(link: Link) -> Inverse:
    """The inverse of the layer's activation."""
    return _NOTHING if link.activation is None else _INVERSES[type(link.activation)](link.activation)


def chain_of(seen: Observation) -> list[Link]:
    """The layers of a network in order; ModelError if it is not a plain chain."""
    links: list[Link] = []

    def step(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        entered, left = (tuple(tensor.shape[1:]) for tensor in (inputs[0], output))
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
            weight, bias = (_sent(seen, name, part) for part in ("weight", "bias"))
            links.append(Link(name, module, weight, bias, entered, left))
        elif type(module) in _INVERSES and links and links[-1].activation is None:
            links[-1] = replace(links[-1], activation=module)
        elif not isinstance(module, _PASSED):
            raise ModelError(
                f"expected convolutions, linear layers and {', '.join(sorted(kind.__name__ for kind in _INVERSES))} "
                f"in a chain, got {type(module).__name__} at {name!r}; use an attack by search"
            )

    image = torch.linspace(0, 1, seen.inputs.size, dtype=torch.float64).reshape(1, *seen.inputs.shape)
    logits = _run(seen, image, step)
    names = {link.name for link in links}
    if not links or len(names) != len(links) or not torch.allclose(_along(links, seen, image), logits, atol=1e-9):
        raise ModelError(f"expected a plain chain of layers, got {type(seen.model).__name__}; use an attack by search")
    return links


def _sent(seen: Observation, layer: str, part: str) -> Tensor:
    tensor = seen.broadcast.params.get(f"{layer}.{part}")
    return torch.zeros(()).double() if tensor is None else tensor.double()


def _run(seen: Observation, image: Tensor, step: Callable[..., None]) -> Tensor:
    """The logits of an image. step: a forward hook for every module without children, called with its name first."""
    handles = [
        module.register_forward_hook(partial(step, name))
        for name, module in seen.model.named_modules()
        if next(module.children(), None) is None
    ]
    try:
        with torch.no_grad(), mode_of(seen.model, "eval"):
            outputs = functional_call(seen.model, precise(seen), (image,))
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(outputs, Tensor):
        raise ModelError(f"expected a model that returns logits, got {type(outputs).__name__}")
    return outputs


def _along(links: list[Link], seen: Observation, image: Tensor) -> Tensor:
    """The logits computed by the chain alone; a single output u means the logits (0, u)."""
    entered: list[Tensor] = []
    first = seen.model.get_submodule(links[0].name)
    handle = first.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
    try:
        _run(seen, image, lambda *args: None)
    finally:
        handle.remove()
    value = entered[0]
    for link in links:
        value = value.reshape(1, *link.input_shape)
        bias = link.bias if link.layer.bias is not None else None
        if isinstance(link.layer, nn.Linear):
            value = nn.functional.linear(value, link.weight, bias)
        else:
            layer = link.layer
            value = nn.functional.conv2d(value, link.weight, bias, layer.stride, layer.padding, layer.dilation)
        value = value if link.activation is None else link.activation(value)
    return torch.cat([torch.zeros_like(value), value], 1) if value.shape[1] == 1 else value
