"""The catalogue's entry of a metric: which scores leak, a description, and how to build it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.inputs import ONLY_IMAGES, Inputs
from leaktight.core.own import first_words, load_own
from leaktight.core.protocols import Metric
from leaktight.core.text import as_written, sides

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

    judges: the inputs of the metric: images, or the labels of a batch. takes: the kinds of input whose guesses it can
    score. legacy: a metric of published code, for comparing with published tables only. needs_features: whether it
    needs `Resources.extract`. build: makes the metric, or
    raises `MetricUnavailable`.
    """

    leaks_when: LeaksWhen
    description: str
    build: Callable[[Resources], Metric]
    judges: Literal["images", "labels"] = "images"
    takes: frozenset[type[Inputs]] = ONLY_IMAGES
    legacy: bool = False
    needs_features: bool = False


def own_spec(target: str) -> MetricSpec:
    """A metric of the user's own: what "package.module:name" names, or an instance of it if that is a class.

    It is called with guess and truth, (N, C, H, W) in [0, 1], and returns (N,); its `leaks_when` is "high" or "low".
    """
    found = load_own(target, UsageError)
    try:
        metric = found() if isinstance(found, type) else found
    except Exception as error:
        raise UsageError(f"{target} cannot be made without arguments: {first_words(error)}; correct it") from error
    leaks_when = _direction(target, metric)
    if not callable(metric):
        raise UsageError(f"expected {target} to be called with guess and truth, got {type(metric).__name__}")
    built = FunctionMetric(name=target, leaks_when=leaks_when, function=_one_score_each(target, metric))
    return MetricSpec(leaks_when=leaks_when, description="own metric", build=lambda _: built)


def _direction(target: str, metric: object) -> LeaksWhen:
    match getattr(metric, "leaks_when", None):
        case "high":
            return "high"
        case "low":
            return "low"
        case other:
            raise UsageError(
                f'expected {target} to be a metric, which has leaks_when = "high" or "low", '
                f"got {as_written(other)}; set it"
            )


def _one_score_each(target: str, metric: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor, Tensor], Tensor]:
    def scores(guess: Tensor, truth: Tensor) -> Tensor:
        given = metric(guess, truth)
        if not isinstance(given, Tensor) or given.shape != truth.shape[:1]:
            shape = sides(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise UsageError(f"expected {target} to return one score for each image, {len(truth)} in all, got {shape}")
        return given

    return scores
