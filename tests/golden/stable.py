"""Digests of results that are the same wherever the same bits are computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tests.golden.doors import digest, replayed
from torch import Tensor


def stable(value: Any) -> str:
    """A digest of nested tensors (every byte), numbers (6 significant digits) and texts. Order of keys is none."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    match value:
        case Tensor():
            return digest({"tensor": value})
        case bool() | int() | str() | None:
            return value
        case float():
            return f"{value:.6g}"
        case np.ndarray() | np.generic():
            return _plain(value.tolist())
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case Sequence():
            return [_plain(item) for item in value]
    raise TypeError(f"no stable digest of a {type(value).__name__}")


def machine() -> str:
    """How this machine rounds: a digest of plain PyTorch, without the project.

    Other processors and other builds of PyTorch add in another order; their results are as good, but not these bits.
    """
    generator = replayed(0).public()
    images = torch.rand(4, 3, 16, 16, generator=generator)
    kernels = torch.rand(8, 3, 5, 5, generator=generator)
    matrix = torch.rand(40, 24, generator=generator)
    found: dict[str, Tensor] = {}
    for onednn in (True, False):
        with torch.backends.mkldnn.flags(enabled=onednn):
            weight = kernels.clone().requires_grad_()
            outputs = torch.nn.functional.conv2d(images, weight, padding=2)
            (slope,) = torch.autograd.grad(torch.sigmoid(outputs).square().sum(), [weight])
            found |= {f"outputs {onednn}": outputs, f"slope {onednn}": slope}
    for precision in (torch.float32, torch.float64):
        wide = matrix.to(precision)
        solved = torch.linalg.lstsq(wide, wide[:, :3].exp(), driver="gelsd").solution
        squares = wide.T @ wide
        found |= {f"{name} {precision}": each for name, each in (("solved", solved), ("squares", squares))}
        found[f"normal {precision}"] = torch.randn(50, generator=generator, dtype=precision).exp().log1p()
    return stable(found)
