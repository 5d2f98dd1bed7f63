"""Pairs of originals and reconstructions as data URIs, cut from the PNG strips of trials."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from leaktight.core.errors import UsageError
from leaktight.core.reading import read_limited
from leaktight.report.words import METRICS, metric_words, number
from leaktight.results.schema import Trial

MOST_PAIRS = 12
"""The most pairs shown of one attack on one defense."""
MOST_STRIP = 64 * 2**20
"""The most bytes of a file of pictures."""
BUDGET = 24_000_000
"""About the most bytes of pixels in one page; larger images mean fewer pairs."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An original and its reconstruction, as data URIs; None if the file cannot be read."""

    anchor: str
    title: str
    truth: str | None
    guess: str | None
    width: int
    height: int
    scores: tuple[tuple[str, str], ...]
    trial: Trial


@dataclass(frozen=True)
class Place:
    """One example of one trial."""

    trial: Trial
    index: int

    @property
    def words(self) -> str:
        """The client, round and trial, and which of several images."""
        images = self.trial.images
        of = f", image {self.index + 1} of {images.count}" if images and images.count > 1 else ""
        return f"{self.trial.client}, round {self.trial.round}, trial {self.trial.trial}{of}"

    @property
    def figures(self) -> tuple[tuple[str, str], ...]:
        """The scores as label and value, the common metrics first."""
        return tuple(
            (metric_words(metric).label, number(self.score(metric), metric))
            for metric in sorted(self.trial.scores, key=_order)
            if self.score(metric) is not None
        )

    def score(self, metric: str) -> float | None:
        values = self.trial.scores.get(metric) or ()
        return values[self.index] if self.index < len(values) else None

    @property
    def leak(self) -> float:
        """A sort key: the most leaking example comes first."""
        for metric in ("psnr", "ssim", "mse"):
            value = self.score(metric)
            if value is not None:
                return -value if self.trial.leaks_when(metric) == "high" else value
        return math.inf


class Album:
    """The pictures of one run. Each pair has its own anchor."""

    def __init__(self, folder: Path, groups: int, trials: Sequence[Trial]) -> None:
        self.folder = folder.resolve()
        self.strips: dict[str, Image.Image | None] = {}
        self.made = self.groups = 0
        self.most = _pairs_per_group(groups, trials)

    def pairs(self, trials: Sequence[Trial]) -> tuple[list[Pair], int]:
        """The most leaking examples of these trials, and the number of all examples."""
        places = [
            Place(trial, index)
            for trial in trials
            if trial.status == "done" and trial.images
            for index in range(trial.images.count)
        ]
        places.sort(key=lambda place: place.leak)
        return [self._pair(place) for place in places[: self.most]], len(places)

    def anchor(self) -> str:
        """A new anchor for a figure."""
        self.made += 1
        return f"pair-{self.made}"

    def group_anchor(self) -> str:
        """A new anchor for the pictures of one attack on one defense."""
        self.groups += 1
        return f"images-{self.groups}"

    def truth(self, place: Place) -> Image.Image | None:
        """The original."""
        images = place.trial.images
        return self._tile(images.truth, place.index, images.count) if images and images.truth else None

    def guess(self, place: Place) -> Image.Image | None:
        """The reconstruction."""
        images = place.trial.images
        return self._tile(images.guess, place.index, images.count) if images else None

    def _pair(self, place: Place) -> Pair:
        truth, guess = self.truth(place), self.guess(place)
        sample = truth or guess
        return Pair(
            anchor=self.anchor(),
            title=place.words,
            truth=data_uri(truth),
            guess=data_uri(guess),
            width=sample.width if sample else 32,
            height=sample.height if sample else 32,
            scores=place.figures,
            trial=place.trial,
        )

    def _tile(self, file: str, index: int, count: int) -> Image.Image | None:
        strip = self._strip(file)
        if strip is None or index >= count:
            return None
        width = strip.width // count
        return strip.crop((index * width, 0, (index + 1) * width, strip.height)) if width else None

    def _strip(self, file: str) -> Image.Image | None:
        if file not in self.strips:
            self.strips[file] = self._read(file)
        return self.strips[file]

    def _read(self, file: str) -> Image.Image | None:
        path = (self.folder / file).resolve()
        if not path.is_relative_to(self.folder):  # never read a file outside of the run's folder
            return None
        try:
            content = read_limited(path, MOST_STRIP)
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                return image.convert("L" if image.mode in ("1", "L") else "RGB")
        except (UsageError, OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError):
            return None


def _order(metric: str) -> tuple[int, str]:
    names = list(METRICS)
    return (names.index(metric) if metric in METRICS else len(names), metric)


def _pairs_per_group(groups: int, trials: Sequence[Trial]) -> int:
    sizes = [trial.images.size for trial in trials if trial.images]
    largest = max((height * width for height, width in sizes), default=32 * 32)
    return max(1, min(MOST_PAIRS, BUDGET // (max(groups, 1) * largest * 2 * 3)))


def most_leaking(trial: Trial) -> Place:
    """The trial's most leaking example."""
    count = trial.images.count if trial.images else max((len(each or ()) for each in trial.scores.values()), default=1)
    return min((Place(trial, index) for index in range(max(count, 1))), key=lambda place: place.leak)


def data_uri(image: Image.Image | None) -> str | None:
    """The image as a PNG inside of an address."""
    if image is None:
        return None
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
