"""Attacks whose strength is known: some that do not look at the update, and an exact one with noise on its guess."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from leaktight.attacks.exact.linear_inversion import LinearInversion
from leaktight.core.protocols import Attack, LabelSource, Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Observation, Reconstruction

Picture = Literal["mean", "random", "average", "noise", "central", "far"]
Labels = Literal["given", "random", "balanced", "constant"]


@dataclass(frozen=True, kw_only=True)
class Blind(Attack):
    """A guess that does not depend on the update.

    picture: the mean of the public images of the class, a random one, an average of three, noise, the one that is
    closest to that mean, or the one that is farthest from it. labels: those given; random ones; each class equally
    often; all the class that is most frequent in public data.

    What it draws differs between updates, so that its guesses at one victim under two defenses differ.
    """

    picture: Picture
    labels: Labels = "given"

    @property
    def searches(self) -> bool:
        return False

    @property
    def labels_from(self) -> LabelSource:
        return "given" if self.labels == "given" else "inferred"

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        one, generator = seen[-1], _stream(seen[-1], rng)
        public = one.public_data
        assert public is not None
        labels = self._labels(one, public, generator)
        pictures = [self._picture(public.inputs[public.targets == label], generator) for label in labels.tolist()]
        return Reconstruction(Batch(torch.stack(pictures), labels), 0.0)

    def _labels(self, seen: Observation, public: Batch, generator: torch.Generator) -> Tensor:
        count, classes = seen.batch_size or 1, seen.num_classes
        match self.labels:
            case "given":
                assert seen.labels is not None
                return seen.labels
            case "random":
                return torch.randint(classes, (count,), generator=generator)
            case "balanced":
                return torch.arange(count) % classes
            case "constant":
                return public.targets.mode().values.expand(count)

    def _picture(self, images: Tensor, generator: torch.Generator) -> Tensor:
        mean = images.mean(0)
        away = (images - mean).flatten(1).norm(dim=1)
        order = torch.randperm(len(images), generator=generator)
        match self.picture:
            case "mean":
                return mean
            case "random":
                return images[order[0]]
            case "average":
                return images[order[:3]].mean(0)
            case "noise":
                return torch.rand(mean.shape, generator=generator)
            case "central":
                return images[away.argmin()]
            case "far":
                return images[away.argmax()]


@dataclass(frozen=True, kw_only=True)
class NoisyInversion(LinearInversion):
    """Linear-layer inversion, with noise of this standard deviation on its guess.

    The noise follows from the update, so that any change of the update gives other noise: the hardest case for a
    comparison of two updates of one victim.
    """

    noise: float

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        found = super().reconstruct(seen, rng=rng)
        generator = _stream(seen[-1], rng)
        exact = found.guess.inputs
        noise = torch.randn(exact.shape, generator=generator, dtype=exact.dtype)
        return replace(found, guess=replace(found.guess, inputs=exact + self.noise * noise))


def _stream(seen: Observation, rng: Rng) -> torch.Generator:
    """A random stream that is another one for any other update, and says nothing about it."""
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in seen.update.tensors.values()))
    return rng.child("guess", digest.hexdigest()).public()
