"""What a search moves in place of the examples: pixels here; the latents or weights of a generator in `generative`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from leaktight.attacks.labels.rules import Joint
from leaktight.attacks.matching.view import Evidence
from leaktight.attacks.optimizers.optimizer import Tree
from leaktight.core.errors import require_at_least
from leaktight.core.rng import Rng
from leaktight.models.source import require_choice


class SearchSpace(ABC):
    """The variables of a search for given evidence, and the examples that they stand for.

    constants: fixed tensors, shared by all restarts. A traced function takes them as inputs, so every tensor that
    `images`, `label_logits` and `penalty` compute with must be here and not in another attribute.
    """

    def __init__(self, evidence: Evidence, precision: torch.dtype, constants: Tree | None = None) -> None:
        self.shape = (evidence.num_examples, *evidence.shape)
        self.num_classes = evidence.num_classes
        self.precision = precision
        self.constants: Tree = constants or {}

    def form(self) -> object:
        """All that `images`, `label_logits`, `confined` and `penalty` compute with beside their arguments."""
        return type(self), {name: value for name, value in vars(self).items() if name != "constants"}

    @abstractmethod
    def draw(self, rng: Rng) -> Tree:
        """The variables at the start of a restart."""

    @abstractmethod
    def images(self, variables: Tree, constants: Tree) -> Tensor:
        """The images (N, C, H, W) of these variables, a pure function of tensors."""

    def draw_labels(self, labels: Joint, rng: Rng) -> Tree:
        """The variables of the labels at the start, if labels are searched for."""
        return {"labels": labels.draw(self.shape[0], self.num_classes, rng.public()).to(self.precision)}

    def label_logits(self, variables: Tree, constants: Tree) -> Tensor:
        """The logits (N, classes) of the labels, if labels are searched for."""
        logits: Tensor = variables["labels"]
        return logits

    def confined(self, variables: Tree) -> Tree:
        """The nearest allowed variables; applied after every first-order step."""
        return variables

    @property
    def boxed(self) -> int:
        """How many of the first entries L-BFGS with a line search keeps in [0, 1]."""
        return 0

    def penalty(self, variables: Tree, constants: Tree) -> Tensor | None:
        """How unlikely the variables are, a 0-d tensor; None if there is no such term."""
        return None


@dataclass(frozen=True, kw_only=True)
class Sought(ABC):
    """Settings of a search space.

    abreast: whether vmap over restarts can save time; not if a restart moves more numbers than fit into a cache.
    """

    abreast: ClassVar[bool] = True

    @abstractmethod
    def space(self, evidence: Evidence, rng: Rng, precision: torch.dtype) -> SearchSpace:
        """The search space for this evidence. rng: for constants that all restarts share."""

    def again(self, images: Tensor) -> Sought:
        """The settings for another search on the same evidence; it starts at these images if that is possible."""
        return self

    @property
    def rough(self) -> tuple[int, Sought] | None:
        """A search to begin with, its iterations and settings, whose images the search then starts at."""
        return None


Distribution: TypeAlias = Literal["normal", "standard_normal", "uniform"]

DISTRIBUTIONS: Mapping[str, Callable[[tuple[int, ...], Generator], Tensor]] = {
    "normal": lambda shape, generator: 0.5 + 0.25 * torch.randn(shape, generator=generator),
    "standard_normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "uniform": lambda shape, generator: torch.rand(shape, generator=generator),
}
"""Distributions of the first pixels.

normal: N(0.5, 0.25^2), as in Inverting Gradients: N(0, 1) after a normalisation with mean 0.5 and standard deviation
0.25, about that of CIFAR and ImageNet. The 5 % outside [0, 1] are not clamped, as they would all start on the border;
an attack with a box clips after its first step. standard_normal: N(0, 1), as in DLG, whose networks do not normalise.
uniform: U(0, 1). All are drawn on the CPU in float32, so that a seed gives the same start on every device.
"""


@dataclass(frozen=True, kw_only=True)
class Start(ABC):
    """How the first images are chosen. Images are in [0, 1]; normalisation is part of the network."""

    @abstractmethod
    def draw(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        """Images of `shape` (N, C, H, W)."""


@dataclass(frozen=True, kw_only=True)
class Noise(Start):
    """Independent pixels. distribution: one of `DISTRIBUTIONS`."""

    distribution: Distribution = "normal"

    def __post_init__(self) -> None:
        require_choice("distribution", self.distribution, DISTRIBUTIONS)

    def draw(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        return DISTRIBUTIONS[self.distribution](shape, generator)


@dataclass(frozen=True, kw_only=True)
class Patterned(Start):
    """A small square of noise per image, tiled from the top left corner and cut off at the edges.

    patch: the side of the square; CPL has 16 with "uniform" (2x2 tiles for 32x32), Fishing 4 with "normal".
    Reference: Wei et al., A Framework for Evaluating Client Privacy Leakages in Federated Learning, ESORICS 2020.
    """

    patch: int = 16
    distribution: Distribution = "uniform"

    def __post_init__(self) -> None:
        require_choice("distribution", self.distribution, DISTRIBUTIONS)
        require_at_least(1, patch=self.patch)

    def draw(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        count, channels, height, width = shape
        square = DISTRIBUTIONS[self.distribution]((count, channels, self.patch, self.patch), generator)
        tiles = (-(-height // self.patch), -(-width // self.patch))
        return square.tile(tiles)[..., :height, :width].contiguous()


@dataclass(frozen=True, kw_only=True)
class Grey(Start):
    """The same grey `level`, in [0, 1], everywhere. Nothing is random, so all restarts are equal.

    Images with the same label stay equal throughout the search, as their gradients are equal.
    """

    level: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.level <= 1:
            raise ValueError(f"expected level in [0, 1], got {self.level}")

    def draw(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        return torch.full(shape, self.level)


@dataclass(frozen=True, kw_only=True)
class _From(Start):
    """Start at these images."""

    images: Tensor

    def draw(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        return self.images.reshape(shape)


@dataclass(frozen=True, kw_only=True)
class Pixels(Sought):
    """The images themselves. start: how the first ones are chosen. box: keep pixels in [0, 1].

    coarse: iterations of a first search for images of half the height and width, a quarter of the unknowns. What they
    show is found sooner, and images are smooth.
    """

    start: Start = Noise()
    box: bool = True
    coarse: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, coarse=self.coarse)

    def space(self, evidence: Evidence, rng: Rng, precision: torch.dtype) -> SearchSpace:
        return _PixelSpace(self, evidence, precision)

    def again(self, images: Tensor) -> Sought:
        return replace(self, start=_From(images=images), coarse=0)

    @property
    def rough(self) -> tuple[int, Sought] | None:
        return (self.coarse, _Coarse(start=self.start, box=self.box)) if self.coarse else None


class _PixelSpace(SearchSpace):
    def __init__(self, settings: Pixels, evidence: Evidence, precision: torch.dtype) -> None:
        super().__init__(evidence, precision)
        self.settings = settings

    def form(self) -> object:
        return type(self), self.shape, self.settings.box

    @property
    def moved(self) -> tuple[int, ...]:
        """The shape of what is moved."""
        return self.shape

    def draw(self, rng: Rng) -> Tree:
        return {"images": self.settings.start.draw(self.moved, rng.child("images").public()).to(self.precision)}

    def images(self, variables: Tree, constants: Tree) -> Tensor:
        images: Tensor = variables["images"]
        return images

    def confined(self, variables: Tree) -> Tree:
        return {**variables, "images": variables["images"].clamp(0, 1)} if self.settings.box else variables

    @property
    def boxed(self) -> int:
        return torch.Size(self.moved).numel() if self.settings.box else 0


@dataclass(frozen=True, kw_only=True)
class _Coarse(Pixels):
    """Images of half the height and width, between whose pixels others are interpolated."""

    def space(self, evidence: Evidence, rng: Rng, precision: torch.dtype) -> SearchSpace:
        return _CoarseSpace(self, evidence, precision)


class _CoarseSpace(_PixelSpace):
    @property
    def moved(self) -> tuple[int, ...]:
        number, channels, height, width = self.shape
        return number, channels, -(-height // 2), -(-width // 2)

    def images(self, variables: Tree, constants: Tree) -> Tensor:
        return F.interpolate(variables["images"], self.shape[2:], mode="bilinear")
