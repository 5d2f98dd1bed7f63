"""Signs of a tampered model in its weights alone, each as one number, without limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from leaktight.core.errors import ModelError
from leaktight.core.tensors import squared_norm
from leaktight.core.types import Params
from leaktight.models.surgery import final_linear

T = TypeVar("T")

MIN_ROWS = 8
"""Rows of smaller layers can be parallel by chance."""

PARALLEL = 0.9
"""The cosine, or its opposite, from which two rows mirror each other: with noise of a third on rows, bins blur."""

_POWER_STEPS = 12


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


def row_cosines(rows: Tensor) -> Tensor:
    """How parallel or opposite each two of the rows are, in [0, 1]; 0 for a row and itself."""
    unit = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
    cosines: Tensor = (unit @ unit.T).abs()
    return cosines.fill_diagonal_(0.0)


def mirrored(params: Params) -> tuple[str, float]:
    """The matrix with the largest share of rows that have a parallel or opposite row beside them, and that share."""
    worst, most = "", 0.0
    for name, tensor in params.items():
        if tensor.ndim < 2:
            continue
        rows = tensor.detach().flatten(1)
        if min(rows.shape) >= MIN_ROWS:
            closest = row_cosines(rows).amax(1)
            if (share := float((closest > PARALLEL).double().mean())) > most:
                worst, most = name, share
    return worst, most


def head_outliers(model: nn.Module, params: Params) -> dict[str, float]:
    """Of the last linear layer: "row", longest over median row; "bias", largest distance from the median bias.

    The distance is in units of the median row's length, or of 1 if that is less.
    """
    try:
        name, _ = final_linear(model)
    except ModelError:
        return {}
    prefix = f"{name}." if name else ""
    found, length = {}, 1.0
    if (weight := params.get(f"{prefix}weight")) is not None and len(weight) > 2:
        norms = weight.detach().flatten(1).norm(dim=1).double()
        found["row"] = float(norms.max() / norms.median()) if float(norms.median()) else math.inf
        length = max(1.0, float(norms.median()))
    if (bias := params.get(f"{prefix}bias")) is not None:
        found["bias"] = float((bias - bias.median()).abs().max()) / length
    return found


def groups(model: nn.Module, tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """What belongs to the last linear layer ("head"), by the names of tensors, and all other ("rest")."""
    try:
        name, _ = final_linear(model)
    except ModelError:
        return {"rest": dict(tensors)}
    inside = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] == name}
    return {"head": inside, "rest": {key: tensor for key, tensor in tensors.items() if key not in inside}}


def norms(tensors: Params) -> dict[str, float]:
    """The norm of each tensor."""
    return {name: float(squared_norm([tensor]).sqrt()) for name, tensor in tensors.items()}


def group_norms(model: nn.Module, sizes: Mapping[str, float]) -> dict[str, float]:
    """The norm of each group, from those of its tensors."""
    return {name: math.hypot(*part.values()) for name, part in groups(model, sizes).items()}
