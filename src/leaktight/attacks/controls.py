"""Negative controls: guesses by all that an attacker may know but the update, which an attack must beat.

In an audit a control is told the labels and the number of examples, has public data, and is given no update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.view import OneBatch
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.presets.preset import Preset
from leaktight.core.errors import require_at_least
from leaktight.core.inputs import Images
from leaktight.core.protocols import Attack, LabelSource, Progress, require_seen
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Batch, Observation, Reconstruction


@dataclass(frozen=True)
class Control(Attack):
    """A guess that does not depend on the update. draws: an audit asks it so often and takes each example's best."""

    @property
    def searches(self) -> bool:
        return False

    @property
    def draws(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class MeanImage(Control):
    """The mean of the public images of each example's class; of all where the class is unknown or has none.

    Mid-grey without public data. Without a number of examples the answer has one image for each disclosed label, or one
    image. Labels are those disclosed, else random (for words: empty). The loss is NaN.
    """

    requires: ClassVar[frozenset[Knowledge]] = frozenset()

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        first = require_seen(self, seen)
        if first.public_data is None:
            grey = Images.require(type(self).__name__, first.inputs).grey()
            return _answer(first, lambda label: grey, "grey", rng, progress)
        public = first.public_data
        return _answer(first, lambda label: _of_class(first, public, label).mean(0), "public data", rng, progress)


@dataclass(frozen=True, kw_only=True)
class PublicImage(Control):
    """A random public image of each example's class; of any class where it is unknown or has none.

    draws: how often an audit draws; the best of them for each example is the control's score, >= 1.
    Labels and the number of images are those of `mean_image`. The loss is NaN.
    """

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.PUBLIC_DATA})

    draws: int = 5

    def __post_init__(self) -> None:
        require_at_least(1, draws=self.draws)

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        first = require_seen(self, seen)
        require(first, *self.requires)
        public, generator = first.public_data, rng.child("images").public()
        assert public is not None

        def drawn(label: int | None) -> Tensor:
            images = _of_class(first, public, label)
            return images[int(torch.randint(len(images), (), generator=generator))]

        return _answer(first, drawn, "public data", rng, progress)


@dataclass(frozen=True, kw_only=True)
class KnownOrBlind(LabelStrategy):
    """The disclosed labels; where there are none, labels that do not depend on the update."""

    source: ClassVar[LabelSource] = "not needed"

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        if seen.labels is not None and len(seen.labels) == num_examples:
            return seen.labels.clone()
        return seen.task.blind_targets(num_examples, seen.num_classes, rng.public())


@dataclass(frozen=True, kw_only=True)
class PriorOnly(Preset, Control):
    """Negative control: a search by total variation alone, without the update.

    labels: None or `given`; `local` has no effect. learning_rate: of the search.
    """

    iterations: int = 200
    learning_rate: float = 0.025

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels is not None and self.labels.source == "inferred":
            raise ValueError("expected prior_only without a rule that reads labels from the update; leave labels out")

    @property
    def wants_labels(self) -> bool:
        return False

    def matching(self) -> Matching:
        return replace(
            self.shared(),
            objective=None,
            matched=OneBatch(),  # never compared
            labels=self.labels or KnownOrBlind(),
            priors=((1.0, TotalVariation()),),
            optimizer=Adam(learning_rate=self.learning_rate, slope="sign", decay="steps"),
        )


def _of_class(seen: Observation, public: Batch, label: int | None) -> Tensor:
    """The public images of a class; all where it is unknown or has none."""
    if label is None or not seen.task.one_class:
        return public.inputs
    own = public.inputs[public.targets == label]
    return own if len(own) else public.inputs


def _answer(
    seen: Observation, image: Callable[[int | None], Tensor], source: str, rng: Rng, progress: Progress | None
) -> Reconstruction:
    """One image for each example. image: maps a class, or None where it is unknown, to an image (C, H, W)."""
    known = seen.labels
    count = seen.batch_size or (1 if known is None else len(known))
    labels = KnownOrBlind().infer(seen, count, rng=rng.child("labels"))
    classed = known is not None and len(known) == count and seen.task.one_class
    classes: list[int | None] = labels.tolist() if classed else [None] * count
    guess = Batch(torch.stack([image(label) for label in classes]), labels)
    if progress is not None:
        progress(0, float("nan"), guess.inputs)
    return Reconstruction(guess, float("nan"), {"source": source}, first_loss=float("nan"))
