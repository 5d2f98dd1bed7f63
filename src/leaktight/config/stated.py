"""What a Python caller states about a captured update, as plain numbers; what cannot be meant is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import torch

from leaktight.config.capture import CaptureRequest
from leaktight.core.errors import UsageError
from leaktight.core.text import as_written
from leaktight.core.types import Mode

_KINDS = ("delta", "gradient")


def as_stated(request: CaptureRequest) -> CaptureRequest:
    """The request with its numbers as such: tensors, arrays and single numbers are taken as sequences are."""
    _one_of("kind", request.kind, _KINDS)
    _one_of("mode", request.mode, get_args(Mode))
    labels = None if request.labels is None else _numbers("labels", request.labels, "one class for each example")
    return replace(
        request,
        labels=None if labels is None else _whole("labels", labels),
        shape=_whole("shape", _numbers("shape", request.shape, "C,H,W of an image, such as (1, 28, 28)", single=False)),
        mean=_numbers("mean", request.mean, "one number or one per channel"),
        std=_numbers("std", request.std, "one number or one per channel"),
    )


def _one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise UsageError(f"expected {name} {' or '.join(known)}, got {as_written(value)}; correct it")


def _numbers(name: str, value: object, wanted: str, *, single: bool = True) -> list[float]:
    """A number or a flat sequence of numbers as a list."""
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError):  # lists of different lengths
        array = np.asarray(None)
    flat = array.ndim == 1 or (single and array.ndim == 0)
    if not flat or (array.size and array.dtype.kind not in "iuf"):
        got = f"{array.ndim} dimensions" if array.ndim > 1 else as_written(value)
        raise UsageError(f"expected {name}: {wanted}, got {got}; correct it")
    found: list[float] = np.atleast_1d(array).tolist()
    return found


def _whole(name: str, values: Sequence[float]) -> list[int]:
    if not all(isinstance(value, int) for value in values):
        raise UsageError(f"expected {name} that are integers, got floats; convert them")
    return [int(value) for value in values]
