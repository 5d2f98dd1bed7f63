"""Find the layers of any network and their inputs, and make batch norm safe for function transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedBuffer, is_lazy

from leaktight.core.errors import ModelError
from leaktight.core.types import Mode, Params

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ConvBlock(NamedTuple):
    """The names of a convolution and of the batch norm that follows it, if one does."""

    conv: str
    norm: str | None


def final_linear(model: nn.Module, inputs: Tensor | None = None) -> tuple[str, nn.Linear]:
    """The last linear layer and its name.

    With `inputs` (N, C, H, W) the one that runs last; without, the one registered last, which is the same in all
    networks of the catalogue.
    """
    *_, (name, layer) = [("", None), *layers_in_order(model, (nn.Linear,), inputs)]
    if not isinstance(layer, nn.Linear):
        raise ModelError("expected a model with a linear layer, got none; choose a model that ends in nn.Linear")
    return name, layer


def conv_bn_blocks(model: nn.Module, inputs: Tensor | None = None) -> tuple[ConvBlock, ...]:
    """Every convolution, projections included, with the batch norm that follows it before the next convolution.

    With `inputs` in the order in which they run; without, in the order of registration, which is the same in every
    network of the catalogue.
    """
    blocks: list[ConvBlock] = []
    for name, module in layers_in_order(model, (*CONVOLUTIONS, _BatchNorm), inputs):
        if isinstance(module, CONVOLUTIONS):
            blocks.append(ConvBlock(name, None))
        elif blocks and blocks[-1].norm is None:
            blocks[-1] = ConvBlock(blocks[-1].conv, name)
    return tuple(blocks)


def lazy_names(model: nn.Module) -> list[str]:
    """The parameters and buffers of lazy modules that have no size yet."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if is_lazy(tensor)]


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, also of one with lazy modules, whose buffers PyTorch does not copy."""
    lazy = [each for each in model.buffers() if isinstance(each, UninitializedBuffer)]
    return copy.deepcopy(model, {id(each): UninitializedBuffer() for each in lazy})


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def batch_statistics(model: nn.Module) -> nn.Module:
    """A copy whose batch norm, in training mode, does not update its running statistics.

    Function transforms and tracing do not allow that update. Outputs, gradients and names are exactly those of the
    original; evaluation mode is unchanged.
    """
    pure = copy.deepcopy(model)
    for module in pure.modules():
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
    return pure


def representation(model: nn.Module, params: Params, buffers: Params, inputs: Tensor) -> Tensor:
    """The input (N, features) of the linear layer that runs last, which MSE-R and Soteria use.

    A pure function, also under `torch.func` transforms; in training mode pass `batch_statistics(model)`.
    """
    entered = layer_inputs(model, params, buffers, inputs, (nn.Linear,))
    if not entered:
        raise ModelError("expected a model that runs a linear layer, got none; choose a model that ends in nn.Linear")
    return entered[-1][1]


def layer_inputs(
    model: nn.Module, params: Params, buffers: Params, inputs: Tensor, kinds: tuple[type[nn.Module], ...]
) -> list[tuple[str, Tensor]]:
    """The name and the input of each layer of these kinds, in the order in which they run."""
    entered: list[tuple[str, Tensor]] = []

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda layer, args: entered.append((name, args[0]))

    handles = [
        module.register_forward_pre_hook(keep(name))
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    try:
        # Cloned, because batch norm may write to its buffers.
        functional_call(model, ({name: b.clone() for name, b in buffers.items()}, dict(params)), (inputs,))
    finally:
        for handle in handles:
            handle.remove()
    return entered


def working_bytes(model: nn.Module, params: Params, buffers: Params, inputs: Tensor) -> int:
    """About the most memory of a gradient and its derivative: what a pass keeps, and copies of the parameters."""
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    leaves = {name: tensor.detach().requires_grad_(tensor.is_floating_point()) for name, tensor in params.items()}
    statistics = {name: tensor.clone() for name, tensor in buffers.items()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        functional_call(model, (leaves, statistics), (inputs,))
    return _PASSES * kept + _COPIES * sum(tensor.nbytes for tensor in params.values())


_PASSES, _COPIES = 4, 6
"""Tensors that a second derivative keeps for each of a forward pass; gradients and states of optimisers, generously."""


@contextmanager
def mode_of(model: nn.Module, mode: Mode) -> Iterator[None]:
    """Set a model to training or evaluation mode inside the block; every layer then gets its former mode back."""
    before = [(module, module.training) for module in model.modules()]
    model.train(mode == "train")
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def layers_in_order(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], inputs: Tensor | None = None
) -> list[tuple[str, nn.Module]]:
    """The layers of these kinds, by registration or, with inputs, by their last run."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    if inputs is None:
        return list(found.items())
    with torch.no_grad(), mode_of(model, "eval"):
        entered = layer_inputs(model, dict(model.named_parameters()), {}, inputs, kinds)
    last_run = {name: place for place, (name, _) in enumerate(entered)}
    return [(name, found[name]) for name in sorted(last_run, key=last_run.__getitem__)]
