"""Identification: whether a guess picks its own victim out of decoys, examples of the same classes.

A guess that does not depend on the victim, given its labels, is as close to the decoys as to the victim. So the
victim's place among them is uniform, or worse where scores are equal, and a test of it needs no threshold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leaktight.core.inputs import GREY
from leaktight.core.types import Batch, Examples
from leaktight.metrics.image import psnr_of
from leaktight.metrics.match import assign, mse_cost
from leaktight.metrics.windows import Windows
from leaktight.results.schema import Rank

MOST_DECOYS = 99
METRICS = ("psnr", "ssim")
CHUNK = 2_000_000
"""The most pixels that are compared at once."""
_WORST = -1e9
"""The score of a guess that is not finite."""


@dataclass(frozen=True)
class DecoyPool:
    """The training examples of all clients, from which decoys are drawn. classed: whether a target is one class."""

    examples: Examples
    classed: bool

    @cached_property
    def _places(self) -> dict[int, Tensor]:
        """The indices of the examples by class; all under 0 if targets are no classes."""
        if not self.classed:
            return {0: torch.arange(len(self.examples))}
        targets = self.examples.targets
        return {int(label): (targets == label).nonzero().flatten() for label in targets.unique()}

    def draw(self, truth: Batch, behind: Tensor, rng: np.random.Generator) -> Examples | None:
        """K batches of len(truth) decoys, each with the labels of `truth`, no image twice; None if images are too few.

        behind: all images behind the observed updates, (M, C, H, W), none of which is drawn.
        """
        labels: list[int] = truth.targets.tolist() if self.classed else [0] * len(truth)
        wanted = Counter(labels)
        own = {image.tobytes() for image in behind.numpy()}
        drawn = {label: self._drawn(label, number, own, rng) for label, number in sorted(wanted.items())}
        count = min(MOST_DECOYS, *(len(drawn[label]) // number for label, number in wanted.items()))
        if not count:
            return None
        parts = {label: iter(places[: count * wanted[label]].split(count)) for label, places in drawn.items()}
        return self.examples.take(torch.stack([next(parts[label]) for label in labels], 1).flatten())

    def _drawn(self, label: int, number: int, own: set[bytes], rng: np.random.Generator) -> Tensor:
        """Indices of a class in random order, enough for `number` in each batch, none of them of an image in `own`."""
        places = self._places.get(label, torch.zeros(0, dtype=torch.long))
        wanted = number * MOST_DECOYS
        order = places[torch.from_numpy(rng.permutation(len(places)))][: wanted + len(own)]
        images = self.examples.batch(order).inputs.numpy()
        kept = [place for place, image in zip(order.tolist(), images, strict=True) if image.tobytes() not in own]
        return torch.tensor(kept[:wanted], dtype=torch.long)


class Identified(NamedTuple):
    """rank: of the victim among the decoys. decoy_scores: by metric, for each true example the best score of its
    matched guess against the decoys at its position; None if the guess is not finite."""

    rank: Rank
    decoy_scores: dict[str, tuple[float | None, ...]]


def identify(guess: Tensor, truth: Tensor, decoys: Examples) -> Identified:
    """Compare a guess (G, C, H, W) with its victim (N, C, H, W) and with K batches of N decoys.

    The guess is matched anew to each of these K + 1 candidates. A candidate's mean and best PSNR and SSIM over its
    examples give four ranks; the smallest sum is the first place. Equal sums count against the guess.
    """
    number = len(truth)
    grey = torch.full_like(truth[:1], GREY)  # for an example without a guess
    guesses = Windows.of(torch.cat([guess.detach().to(truth), grey]))
    errors = mse_cost(guesses.images, truth)
    own = _matched(errors, number)
    parts = [_scores(guesses, truth, errors, own, own)]
    for images in _in_parts(decoys, number):
        errors = mse_cost(guesses.images, images)
        parts.append(_scores(guesses, images, errors, _matched(errors, number), own.repeat(len(images) // number)))
    anew, kept = torch.cat(parts, 2).unflatten(2, (-1, number))
    sums = _rank_sums(torch.cat([anew.mean(2), anew.amax(2)]))
    place = 1 + int((sums[1:] <= sums[0]).sum())
    closest = [tuple(None if best == _WORST else best for best in each) for each in kept[:, 1:].amax(1).tolist()]
    return Identified(Rank(place=place, decoys=len(decoys) // number), dict(zip(METRICS, closest, strict=True)))


def _matched(errors: Tensor, number: int) -> Tensor:
    """The guess of each image, by batches of `number`; -1, the grey one, for an image without a guess.

    errors: (G + 1, images), in the last row those of grey.
    """
    if number == 1:
        return torch.zeros(errors.shape[1], dtype=torch.long) if len(errors) > 1 else torch.full((errors.shape[1],), -1)
    return torch.cat([assign(block) for block in errors[:-1].split(number, 1)])


def _scores(guesses: Windows, images: Tensor, errors: Tensor, anew: Tensor, kept: Tensor) -> Tensor:
    """Of images (n, C, H, W), by the guesses matched anew and by those of the victim's match: PSNR and SSIM, (2, 2, n).

    errors: of each guess and image.
    """
    theirs = Windows.of(images)
    places = torch.arange(len(images))
    found = torch.stack([psnr_of(errors[anew, places]), guesses.take(anew).ssim(theirs)])
    same = found.clone()
    moved = (anew != kept).nonzero().flatten()
    if len(moved):
        others = guesses.take(kept[moved]).ssim(theirs.take(moved))
        same[:, moved] = torch.stack([psnr_of(errors[kept[moved], moved]), others])
    return torch.stack([found, same]).nan_to_num(nan=_WORST)


def _in_parts(decoys: Examples, number: int) -> Iterator[Tensor]:
    """The decoys as images, some batches of `number` at a time."""
    step = number * max(1, CHUNK // (number * decoys.example.size))
    for start in range(0, len(decoys), step):
        yield decoys.batch(slice(start, start + step)).inputs


def _rank_sums(scores: Tensor) -> Tensor:
    """The sums over the rows of scores (rows, candidates) of each candidate's rank; 1 for the highest score."""
    from scipy.stats import rankdata  # slow to import

    return torch.from_numpy(rankdata(-scores.numpy(), axis=1)).sum(0)
