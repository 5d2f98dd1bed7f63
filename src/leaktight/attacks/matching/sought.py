"""What a search moves, and the examples that it stands for: pixels here; a generator's weights or latents elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from leaktight.attacks.labels.rules import Joint
from leaktight.attacks.matching.initial import Noise, Start
from leaktight.attacks.matching.view import Evidence
from leaktight.attacks.optimizers.trees import Tree
from leaktight.core.rng import Rng


class Form(ABC):
    """What is unknown, as tensors by name that a search moves.

    constants: tensors that never change in a search, shared by its restarts. A traced function takes them as inputs, so
    whatever a form computes with belongs here, and not in its other attributes.
    """

    def __init__(self, evidence: Evidence, precision: torch.dtype, constants: Tree | None = None) -> None:
        self.shape = (evidence.num_examples, *evidence.shape)
        self.num_classes = evidence.num_classes
        self.precision = precision
        self.constants: Tree = constants or {}

    @abstractmethod
    def draw(self, rng: Rng) -> Tree:
        """Tensors by name: where a restart begins."""

    @abstractmethod
    def images(self, variables: Tree, constants: Tree) -> Tensor:
        """The images (N, C, H, W) that these variables stand for: a pure function of tensors."""

    def draw_labels(self, labels: Joint, rng: Rng) -> Tree:
        """More variables, for a search that finds labels too."""
        return {"labels": labels.draw(self.shape[0], self.num_classes, rng.public()).to(self.precision)}

    def label_logits(self, variables: Tree, constants: Tree) -> Tensor:
        """The labels (N, C) that these variables stand for, where labels are searched."""
        logits: Tensor = variables["labels"]
        return logits

    def confined(self, variables: Tree) -> Tree:
        """The nearest variables that are allowed; asked after every step of a first-order search."""
        return variables

    @property
    def boxed(self) -> int:
        """How many entries, from the first on, L-BFGS with a line search keeps in [0, 1]."""
        return 0

    def penalty(self, variables: Tree, constants: Tree) -> Tensor | None:
        """How unlikely the variables themselves are, a 0-d tensor; None where nothing is known about that."""
        return None


@dataclass(frozen=True, kw_only=True)
class Sought(ABC):
    """A way to stand for examples.

    abreast: whether several searches gain by being one function under vmap; not where each moves more than caches hold.
    """

    abreast: ClassVar[bool] = True

    @abstractmethod
    def form(self, evidence: Evidence, rng: Rng, precision: torch.dtype) -> Form:
        """The unknown of this evidence. rng: for what a victim's restarts share."""

    def again(self, images: Tensor) -> Sought:
        """The same for another search of the same victim, from these images where that is possible."""
        return self


@dataclass(frozen=True, kw_only=True)
class Pixels(Sought):
    """The images themselves. start: the first ones. box: keep pixels in [0, 1]."""

    start: Start = Noise()
    box: bool = True

    def form(self, evidence: Evidence, rng: Rng, precision: torch.dtype) -> Form:
        return _PixelForm(self, evidence, precision)

    def again(self, images: Tensor) -> Sought:
        return replace(self, start=_From(images=images))


class _PixelForm(Form):
    def __init__(self, settings: Pixels, evidence: Evidence, precision: torch.dtype) -> None:
        super().__init__(evidence, precision)
        self.settings = settings

    def draw(self, rng: Rng) -> Tree:
        return {"images": self.settings.start.draw(self.shape, rng.child("images").public()).to(self.precision)}

    def images(self, variables: Tree, constants: Tree) -> Tensor:
        images: Tensor = variables["images"]
        return images

    def confined(self, variables: Tree) -> Tree:
        return {**variables, "images": variables["images"].clamp(0, 1)} if self.settings.box else variables

    @property
    def boxed(self) -> int:
        return torch.Size(self.shape).numel() if self.settings.box else 0


@dataclass(frozen=True, kw_only=True)
class _From(Start):
    """Begin at these images."""

    images: Tensor

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return self.images.reshape(shape)
