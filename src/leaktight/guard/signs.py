"""Signs of a tampered model, each as one number, without limits."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from leaktight.core.errors import ModelError
from leaktight.core.tensors import buffers_of, cloned, parameters_of, squared_norm
from leaktight.core.types import Broadcast, Params
from leaktight.models.surgery import final_linear, mode_of

MIN_ROWS = 8
"""Rows of smaller layers can be parallel by chance."""

_POWER_STEPS = 12
_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.GELU, nn.Hardtanh, nn.SiLU, nn.ELU)


def architecture_change(broadcast: Broadcast, agreed: nn.Module) -> str | None:
    """The first difference of the architecture from the one agreed on, or None."""
    for known, sent, kind in (
        (parameters_of(agreed), broadcast.params, "parameter"),
        (buffers_of(agreed), broadcast.buffers, "buffer"),
    ):
        for name in [*sent, *known]:
            if name not in known or name not in sent:
                return f"{kind} {name!r} {'was added' if name in sent else 'is missing'}"
            if known[name].shape != sent[name].shape:
                return f"{name!r} has shape {tuple(sent[name].shape)} instead of {tuple(known[name].shape)}"
    if broadcast.model is not None and _layout(broadcast.model) != _layout(agreed):
        return "the network that was sent has other modules than the one agreed on"
    return None


def _layout(model: nn.Module) -> list[tuple[str, str, int]]:
    return [
        (name, f"{type(module).__module__}.{type(module).__qualname__}", _hooks(module))
        for name, module in model.named_modules()
    ]


def _hooks(module: nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


def likeness(params: Params) -> tuple[str, float]:
    """The matrix whose rows (or, for linear layers, columns) are closest to parallel, and how close they are.

    The largest share of the energy of the unit rows along one direction: about 1 / rows at random, 1 if all are
    parallel. Rows of zeros count as parallel to all others.
    """
    worst, most = "", 0.0
    for name, tensor in params.items():
        if tensor.ndim < 2:
            continue
        matrix = tensor.detach().flatten(1)
        for rows in (matrix, matrix.T) if tensor.ndim == 2 else (matrix,):
            if min(rows.shape) >= MIN_ROWS and (share := _shared_direction(rows)) > most:
                worst, most = name, share
    return worst, most


def _shared_direction(rows: Tensor) -> float:
    norms = rows.norm(dim=1, keepdim=True)
    unit = rows / norms.clamp_min(1e-30)
    empty = int((norms <= 1e-12 * norms.max()).sum())
    direction = unit[int(norms.argmax())]
    for _ in range(_POWER_STEPS):
        pulled = unit.T @ (unit @ direction)
        direction = pulled / pulled.norm().clamp_min(1e-30)
    energy = float((unit @ direction).square().sum())
    return (energy + empty) / len(rows)


def head_outliers(model: nn.Module, params: Params) -> dict[str, float]:
    """Of the last linear layer: "row", longest over median row; "bias", largest distance from the median bias."""
    try:
        name, _ = final_linear(model)
    except ModelError:
        return {}
    prefix = f"{name}." if name else ""
    found = {}
    if (weight := params.get(f"{prefix}weight")) is not None and len(weight) > 2:
        norms = weight.detach().flatten(1).norm(dim=1).double()
        found["row"] = float(norms.max() / norms.median()) if float(norms.median()) else math.inf
    if (bias := params.get(f"{prefix}bias")) is not None:
        found["bias"] = float((bias - bias.median()).abs().max())
    return found


def groups(model: nn.Module, tensors: Params) -> dict[str, dict[str, Tensor]]:
    """The tensors of the last linear layer ("head"), and all others ("rest")."""
    try:
        name, _ = final_linear(model)
    except ModelError:
        return {"rest": dict(tensors)}
    inside = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] == name}
    return {"head": inside, "rest": {key: tensor for key, tensor in tensors.items() if key not in inside}}


def group_norms(model: nn.Module, tensors: Params) -> dict[str, float]:
    return {name: float(squared_norm(part.values()).sqrt()) for name, part in groups(model, tensors).items()}


def constant_units(model: nn.Module, params: Params, buffers: Params, inputs: Tensor) -> float:
    """The largest share, over the activations, of units that are constant on all images (N, C, H, W).

    Dead or saturated units are; in evaluation mode.
    """
    still = [0.0]

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if len(output) == len(inputs) > 1:
            moved = output.amax(0) - output.amin(0) > 1e-6 * output.abs().max()
            still.append(1.0 - float(moved.double().mean()))

    handles = [module.register_forward_hook(keep) for module in model.modules() if isinstance(module, _ACTIVATIONS)]
    try:
        with torch.no_grad(), mode_of(model, "eval"):
            functional_call(model, ({**params}, cloned(buffers)), (inputs,))
    finally:
        for handle in handles:
            handle.remove()
    return max(still)
