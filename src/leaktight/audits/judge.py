"""How much of the truth a guess shows: one match, all scores, and the two pictures."""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from leaktight.core.inputs import Images
from leaktight.core.types import Batch
from leaktight.metrics import BuiltMetrics, align, label_accuracy, match
from leaktight.results.schema import MetricNote


@dataclass(frozen=True)
class Judged:
    """scores: by metric one number for each true example; None for a metric that lacks something.

    notes: what the metrics say about themselves. truth, guess: PNG strips of `count` examples side by side, each of
    `size` (height, width).
    """

    scores: dict[str, tuple[float | None, ...] | None]
    notes: dict[str, MetricNote]
    label_accuracy: float
    truth: bytes
    guess: bytes
    size: tuple[int, int]
    count: int


def judge(guess: Batch, truth: Batch, metrics: BuiltMetrics) -> Judged:
    """Match guesses to truths once, then score. Only this function sees both."""
    aligned = align(guess.inputs, truth.inputs, match(guess.inputs, truth.inputs))
    scores: dict[str, tuple[float | None, ...] | None] = {
        name: tuple(metric(aligned, truth.inputs).tolist()) for name, metric in metrics.metrics.items()
    }
    height, width = truth.inputs.shape[-2:]
    return Judged(
        scores=scores | dict.fromkeys(metrics.unavailable),
        notes={name: MetricNote(leaks_when=metric.leaks_when) for name, metric in metrics.metrics.items()},
        label_accuracy=label_accuracy(guess.targets, truth.targets),
        truth=strip(truth.inputs),
        guess=strip(aligned),
        size=(height, width),
        count=len(truth),
    )


def strip(images: Tensor) -> bytes:
    """Images (N, C, H, W) in [0, 1] as one PNG, side by side; what is not finite is black."""
    data = io.BytesIO()
    Image.fromarray(Images.picture(images).numpy()).save(data, format="PNG", optimize=True)
    return data.getvalue()
