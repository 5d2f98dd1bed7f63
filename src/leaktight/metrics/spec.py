"""The catalogue's entry of a metric: which scores leak, a description, and how to build it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.inputs import ONLY_IMAGES, Inputs
from leaktight.core.protocols import Metric

LeaksWhen = Literal["high", "low"]
Extract = Callable[[Tensor], Tensor]
"""Maps images (N, C, H, W) to features (N, ...)."""


class MetricUnavailable(UsageError):
    """A metric that cannot be computed; the message says what is missing and how to supply it."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Inputs of metrics beside guess and truth.

    root: the folder of data sets and weights. extract: maps images to the input of the final linear layer.
    """

    root: Path
    extract: Extract | None = None


@dataclass(frozen=True, kw_only=True)
class FunctionMetric(Metric):
    """A pure function (guess, truth) -> (N,) with a name."""

    name: str
    leaks_when: LeaksWhen
    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, guess: Tensor, truth: Tensor) -> Tensor:
        return self.function(guess, truth)


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """An entry of the catalogue.

    judges: what the metric is given, twice: images, or the labels of a batch.
    takes: the kinds of input that it can judge the guesses of.
    legacy: a convention of published code, for comparing with published tables only.
    build: makes the metric; raises `MetricUnavailable` where something is missing.
    """

    leaks_when: LeaksWhen
    description: str
    build: Callable[[Resources], Metric]
    judges: Literal["images", "labels"] = "images"
    takes: frozenset[type[Inputs]] = ONLY_IMAGES
    legacy: bool = False
