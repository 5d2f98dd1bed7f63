"""How often 95 % intervals of a mean over victims hold the true mean, for the kinds of scores that audits give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from leaktight.audits.judge.cells import RANGES
from leaktight.audits.judge.statistics import interval
from leaktight.core.rng import Rng

Numbers: TypeAlias = NDArray[np.float64]
Shape: TypeAlias = tuple[int, int]
Method: TypeAlias = Callable[["Kind", Numbers, Generator], tuple[Numbers, Numbers]]
"""The lower and upper limits for samples (repetitions, victims) of a kind."""

VICTIMS = (5, 10, 20, 50)
REPETITIONS = 4000
RESAMPLES = 1000
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.9, 0.95)
"""Of victims that are reconstructed exactly, for bimodal scores."""


@dataclass(frozen=True)
class Kind:
    """Scores of victims: a distribution with its mean. group: the row of the table."""

    group: str
    metric: str
    mean: float
    draw: Callable[[Generator, Shape], Numbers]
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.metric}, {self.group}{self.note}"


def bimodal(metric: str, share: float, top: float, rest: Kind) -> Kind:
    """A share of exact reconstructions, the rest near the controls."""

    def draw(generator: Generator, shape: Shape) -> Numbers:
        return np.where(generator.random(shape) < share, top, rest.draw(generator, shape))

    return Kind("bimodal", metric, share * top + (1 - share) * rest.mean, draw, f" {share:g}")


def _beta(group: str, a: float, b: float) -> Kind:
    return Kind(group, "ssim", a / (a + b), lambda generator, shape: generator.beta(a, b, shape))


def _normal(group: str, metric: str, mean: float, deviation: float) -> Kind:
    return Kind(group, metric, mean, lambda generator, shape: generator.normal(mean, deviation, shape))


KINDS = (
    _beta("unimodal, middling", 4, 6),
    _beta("unimodal, high", 20, 5),
    _beta("skewed, mostly near 0", 0.3, 6),
    _beta("skewed, mostly near 1", 6, 0.3),
    _normal("around 0, some below", "ssim", 0.01, 0.03),
    *(bimodal("ssim", share, 1.0, _beta("near the controls", 6, 24)) for share in SHARES),
    Kind("constant", "ssim", 1.0, lambda generator, shape: np.ones(shape)),
    _normal("unimodal, poor", "psnr", 12, 1.5),
    _normal("unimodal, good", "psnr", 28, 5),
    Kind("skewed, few good", "psnr", 14, lambda generator, shape: 10 + generator.exponential(4, shape)),
    *(bimodal("psnr", share, 100.0, _normal("near the controls", "psnr", 12, 1.5)) for share in SHARES),
)


def percentile(kind: Kind, samples: Numbers, generator: Generator) -> tuple[Numbers, Numbers]:
    """Quantiles of the means of resamples."""
    means = _resampled(samples, generator)
    return np.quantile(means, 0.025, axis=1), np.quantile(means, 0.975, axis=1)


def student(kind: Kind, samples: Numbers, generator: Generator) -> tuple[Numbers, Numbers]:
    """Student's t."""
    from scipy.special import stdtrit

    count = samples.shape[1]
    half = stdtrit(count - 1, 0.975) * samples.std(1, ddof=1) / np.sqrt(count)
    return samples.mean(1) - half, samples.mean(1) + half


def bca(kind: Kind, samples: Numbers, generator: Generator) -> tuple[Numbers, Numbers]:
    """Bias-corrected and accelerated bootstrap (Efron 1987); ties with the mean count half."""
    from scipy.special import ndtr, ndtri

    count, mean = samples.shape[1], samples.mean(1, keepdims=True)
    means = np.sort(_resampled(samples, generator), axis=1)
    tie = 1e-12 * (1 + np.abs(mean))
    below = ((means < mean - tie).mean(1) + (means <= mean + tie).mean(1)) / 2
    bias = ndtri(np.clip(below, 0.5 / RESAMPLES, 1 - 0.5 / RESAMPLES))
    without = (mean * count - samples) / (count - 1)
    away = without.mean(1, keepdims=True) - without
    spread = 6 * np.square(away).sum(1) ** 1.5
    acceleration = np.where(spread > 0, (away**3).sum(1) / np.where(spread > 0, spread, 1), 0)
    limits = []
    for side in (0.025, 0.975):
        shifted = bias + ndtri(side)
        place = (ndtr(bias + shifted / (1 - acceleration * shifted)) * RESAMPLES).astype(int)
        limits.append(means[np.arange(len(means)), np.clip(place, 0, RESAMPLES - 1)])
    return limits[0], limits[1]


def chosen(kind: Kind, samples: Numbers, generator: Generator) -> tuple[Numbers, Numbers]:
    """The audit's: Gaffke's limits."""
    low, high = RANGES[kind.metric]
    found = [interval(row, low, high) for row in samples.tolist()]
    return np.array([each.low for each in found]), np.array([each.high for each in found])


METHODS: Mapping[str, Method] = {"percentile": percentile, "t": student, "BCa": bca, "the audit's": chosen}


@dataclass(frozen=True)
class Coverage:
    """The share of samples whose interval holds the mean, and the mean width of the intervals."""

    share: float
    width: float


def coverage(method: Method, kind: Kind, victims: int, repetitions: int) -> Coverage:
    generator = Rng(15).child("coverage", kind.name, victims).public_numpy()
    low, high = method(kind, kind.draw(generator, (repetitions, victims)), generator)
    slack = 1e-9 * (1 + abs(kind.mean))
    holds = (low <= kind.mean + slack) & (kind.mean - slack <= high)
    return Coverage(float(holds.mean()), float((high - low).mean()))


def _resampled(samples: Numbers, generator: Generator) -> Numbers:
    """The means of resamples, (repetitions, RESAMPLES); the same places for every sample."""
    count = samples.shape[1]
    chosen_places = generator.integers(0, count, (RESAMPLES, count))
    counts = np.stack([np.bincount(places, minlength=count) for places in chosen_places], axis=1)
    means: Numbers = samples @ (counts / count)
    return means


def rows(repetitions: int) -> Iterator[str]:
    """The table, as Markdown: coverage in %, with the mean width in brackets; of bimodal kinds the least covered."""
    yield f"| scores | victims | {' | '.join(METHODS)} |"
    yield "|---" * (2 + len(METHODS)) + "|"
    for metric, group in dict.fromkeys((kind.metric, kind.group) for kind in KINDS):
        kinds = [kind for kind in KINDS if (kind.metric, kind.group) == (metric, group)]
        for victims in VICTIMS:
            cells = []
            for method in METHODS.values():
                found = [coverage(method, kind, victims, repetitions) for kind in kinds]
                worst = min(found, key=lambda each: each.share)
                cells.append(
                    f"{100 * worst.share:.1f} ({round(float(np.mean([each.width for each in found])), 9):.3g})"
                )
            yield f"| {metric}, {group} | {victims} | {' | '.join(cells)} |"


def main() -> None:
    for row in rows(REPETITIONS):
        print(row, flush=True)
