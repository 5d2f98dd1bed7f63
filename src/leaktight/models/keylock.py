"""FedKL's key-lock module: a normalisation without scale and shift, and a lock that computes both from a key.

The normalisation is part of the shared network (`normalise_blocks`); a client adds the lock (`lock_blocks`). Both are
children of the layer before them, so that no shared tensor changes its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leaktight.core.errors import ModelError
from leaktight.core.rng import Rng, secret_model
from leaktight.models.surgery import ConvBlock, conv_bn_blocks

Blocks: TypeAlias = Literal["first", "all"]

LOCK = "lock"
_NORM = "norm"
_NORMS: Mapping[type[nn.Module], type[_BatchNorm]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}


class KeyLock(nn.Module):
    """gamma * x + beta per channel of x (N, C, ...), where gamma and beta are linear functions of the key.

    key: (K,). rectified: whether gamma and beta pass through ReLU.
    """

    key: Tensor

    def __init__(self, channels: int, key: Tensor, *, rectified: bool = False) -> None:
        super().__init__()
        self.scale = nn.Linear(len(key), channels, dtype=key.dtype, device=key.device)
        self.shift = nn.Linear(len(key), channels, dtype=key.dtype, device=key.device)
        self.activation = nn.ReLU() if rectified else nn.Identity()
        self.register_buffer("key", key)

    def forward(self, inputs: Tensor) -> Tensor:
        gamma, beta = self.coefficients()
        per_channel = (-1, *(1 for _ in inputs.shape[2:]))
        return gamma.view(per_channel) * inputs + beta.view(per_channel)

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """gamma and beta, (C,) each."""
        return self.activation(self.scale(self.key)), self.activation(self.shift(self.key))


class ScaleShift(nn.Module):
    """scale * x + shift per channel of x (N, C, ...): the effect of a lock, for an attacker without lock and key."""

    scale: Tensor
    shift: Tensor

    def __init__(self, channels: int, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", like.new_ones(channels))
        self.register_buffer("shift", like.new_zeros(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        per_channel = (-1, *(1 for _ in inputs.shape[2:]))
        return self.scale.view(per_channel) * inputs + self.shift.view(per_channel)


def normalise_blocks(model: nn.Module, blocks: Blocks) -> None:
    """Give the first convolution (or all) a batch norm without scale and shift, in place.

    A batch norm after the convolution loses its scale and shift; if there is none, one is added as a child of the
    convolution. A second call changes nothing. Layers are in the order of registration.
    """
    for block in _chosen(model, blocks):
        if block.norm is None:
            conv = model.get_submodule(block.conv)
            _follow(conv, _NORM, _plain_norm(conv))
            continue
        norm = _batch_norm(model, block.norm)
        norm.affine = False
        for name in ("weight", "bias"):
            norm.register_parameter(name, None)


def lock_blocks(model: nn.Module, blocks: Blocks, *, key_length: int, rectified: bool, rng: Rng) -> list[str]:
    """Add a lock to each of the norms of `normalise_blocks`, in place. Returns the names of these norms.

    All locks have the same key, from U(0, 1); their weights have PyTorch's default initialisation.
    """
    drawn = torch.from_numpy(rng.child("key").secret().uniform(key_length, np.float32))
    names = []
    for block in _chosen(model, blocks):
        if block.norm is None or (norm := _batch_norm(model, block.norm)).affine:
            raise ModelError(
                f"expected a batch norm without scale and shift after {block.conv!r}, got none; let the defense "
                "prepare the model that server and clients share"
            )
        weight = model.get_submodule(block.conv).get_parameter("weight")
        key = drawn.to(weight.device, weight.dtype, copy=True)
        with secret_model(rng.child(LOCK, block.norm)):
            _follow(norm, LOCK, KeyLock(norm.num_features, key, rectified=rectified))
        names.append(block.norm)
    return names


def scale_blocks(model: nn.Module, blocks: Blocks) -> list[ConvBlock]:
    """Add a `ScaleShift` in place of each lock of `lock_blocks`, in place. Returns the changed blocks.

    Its buffers are `<norm>.lock.scale` and `<norm>.lock.shift`.
    """
    chosen = []
    for block in _chosen(model, blocks):
        if block.norm is not None and not (norm := _batch_norm(model, block.norm)).affine:
            _follow(norm, LOCK, ScaleShift(norm.num_features, model.get_submodule(block.conv).get_parameter("weight")))
            chosen.append(block)
    return chosen


def _chosen(model: nn.Module, blocks: Blocks) -> tuple[ConvBlock, ...]:
    found = conv_bn_blocks(model)
    if not found:
        raise ModelError("expected a model with a convolution to lock, got none; choose a model with convolutions")
    return found if blocks == "all" else found[:1]


def _batch_norm(model: nn.Module, name: str) -> _BatchNorm:
    norm = model.get_submodule(name)
    assert isinstance(norm, _BatchNorm)
    return norm


def _plain_norm(conv: nn.Module) -> nn.Module:
    kind = next(norm for convolution, norm in _NORMS.items() if isinstance(conv, convolution))
    weight = conv.get_parameter("weight")
    return kind(len(weight), affine=False, dtype=weight.dtype, device=weight.device)


def _follow(layer: nn.Module, name: str, successor: nn.Module) -> None:
    """Run `successor` on the outputs of `layer`, as its child `name`."""
    layer.add_module(name, successor)
    layer.register_forward_hook(_Then(name))


@dataclass(frozen=True)
class _Then:
    """A forward hook that finds its module by name, so that it works in copies of the model."""

    name: str

    def __call__(self, layer: nn.Module, inputs: object, outputs: Tensor) -> Tensor:
        result: Tensor = layer.get_submodule(self.name)(outputs)
        return result
