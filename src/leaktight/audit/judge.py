"""How much of the truth a guess shows: one match, all scores, and the two pictures."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from leaktight.core.inputs import Images
from leaktight.core.types import Batch
from leaktight.metrics import BuiltMetrics, align, label_accuracy, match


@dataclass(frozen=True)
class Judged:
    """scores: by metric one number for each true example, None where it is not finite; None for a metric that lacks
    something. truth, guess: PNG strips of the examples side by side, each of `size` (height, width).
    """

    scores: dict[str, list[float | None] | None]
    label_accuracy: float
    truth: bytes
    guess: bytes
    size: list[int]
    count: int


def judge(guess: Batch, truth: Batch, metrics: BuiltMetrics) -> Judged:
    """Match guesses to truths once, then score. Only this function sees both."""
    aligned = align(guess.inputs, truth.inputs, match(guess.inputs, truth.inputs))
    scores: dict[str, list[float | None] | None] = {
        name: [finite(value) for value in metric(aligned, truth.inputs).tolist()]
        for name, metric in metrics.metrics.items()
    }
    return Judged(
        scores=scores | dict.fromkeys(metrics.unavailable),
        label_accuracy=label_accuracy(guess.targets, truth.targets),
        truth=strip(truth.inputs),
        guess=strip(aligned),
        size=list(truth.inputs.shape[-2:]),
        count=len(truth),
    )


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def strip(images: Tensor) -> bytes:
    """Images (N, C, H, W) in [0, 1] as one PNG, side by side; what is not finite is black."""
    data = io.BytesIO()
    Image.fromarray(Images.picture(images).numpy()).save(data, format="PNG", optimize=True)
    return data.getvalue()
