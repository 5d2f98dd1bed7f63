"""GRNN: a search over the weights of an untrained generator of images and of a linear layer for labels.

Reference: Ren, Deng and Xie, GRNN: Generative Regression Neural Network - A Data Leakage Attack for Federated Learning,
ACM TIST 2022; Ren, thesis, chapter 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from leaktight.attacks.labels.rules import Joint
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import Cosine, Euclidean, Objective, SortedWasserstein, SquaredError, Sum
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.soft import softened
from leaktight.attacks.matching.sought import SearchSpace, Sought
from leaktight.attacks.matching.view import Evidence
from leaktight.attacks.optimizers.descent import RmsProp
from leaktight.attacks.optimizers.first_order import Decay
from leaktight.attacks.optimizers.optimizer import Tree
from leaktight.attacks.presets.preset import Preset
from leaktight.core.errors import require_at_least
from leaktight.core.inputs import Images
from leaktight.core.rng import Rng, global_seed
from leaktight.models.generators import GrnnGenerator
from leaktight.models.source import require_choice

_IMAGES, _LABELS = "images.", "labels."  # prefixes of the names of the two branches' parameters


@dataclass(frozen=True, kw_only=True)
class UntrainedGenerator(Sought):
    """The weights of an untrained generator, which makes the images from fixed noise.

    latent: the length of the noise vector of each image, >= 1.
    """

    abreast: ClassVar[bool] = False

    latent: int = 128

    def __post_init__(self) -> None:
        require_at_least(1, latent=self.latent)

    def space(self, evidence: Evidence, rng: Rng, precision: torch.dtype) -> SearchSpace:
        return _Branches(self, evidence, rng, precision)


class _Branches(SearchSpace):
    """The image branch and, if labels are searched for, the label branch, with the same noise as input."""

    def __init__(self, settings: UntrainedGenerator, evidence: Evidence, rng: Rng, precision: torch.dtype) -> None:
        noise = torch.randn(evidence.num_examples, settings.latent, generator=rng.child("noise").public())
        super().__init__(evidence, precision, {"noise": noise.to(precision)})
        self.latent, self.image_shape = settings.latent, evidence.shape
        with torch.device("meta"):  # weights are passed in with every call
            self.skeletons: Mapping[str, nn.Module] = {_IMAGES: self._image_branch(), _LABELS: self._label_branch()}

    def _image_branch(self) -> nn.Module:
        return GrnnGenerator(self.latent, Images(*self.image_shape))

    def _label_branch(self) -> nn.Module:
        return nn.Linear(self.latent, self.num_classes)

    def draw(self, rng: Rng) -> Tree:
        with global_seed(rng.child("images")):
            return self._named(_IMAGES, self._image_branch())

    def draw_labels(self, labels: Joint, rng: Rng) -> Tree:
        with global_seed(rng):
            return self._named(_LABELS, self._label_branch())

    def images(self, variables: Tree, constants: Tree) -> Tensor:
        return self._run(_IMAGES, variables, constants)

    def label_logits(self, variables: Tree, constants: Tree) -> Tensor:
        return self._run(_LABELS, variables, constants)

    def _named(self, branch: str, module: nn.Module) -> Tree:
        return {f"{branch}{name}": weight.detach().to(self.precision) for name, weight in module.named_parameters()}

    def _run(self, branch: str, variables: Tree, constants: Tree) -> Tensor:
        weights = {name.removeprefix(branch): v for name, v in variables.items() if name.startswith(branch)}
        made: Tensor = functional_call(self.skeletons[branch], weights, (constants["noise"],))
        return made


_DISTANCES: Mapping[str, Objective] = {"paper": SortedWasserstein(), "code": Euclidean()}


@dataclass(frozen=True, kw_only=True)
class Grnn(Preset):
    """GRNN: an untrained generator is trained to make images and labels whose gradient is the observed one.

    squared, wasserstein, cosine, total_variation: weights of the terms of the loss, >= 0; 0 leaves a term out.
    variant: "paper", the Wasserstein distance of the sorted values; "code", the Euclidean norm in its place.
    latent: the length of the noise vector of each image.
    learning_rate, momentum: of RMSprop on the generator's weights. decay: how the rate falls over the iterations.
    softening: the first temperature of soft max-pooling in guesses, which falls to a hundredth; 0: hard max-pooling.
    Reference: Ren et al. 2022. Assumes: the number of examples.
    Differs from the paper: 2000 iterations at a rate that falls from 1.5e-4 as a cosine (paper: 1000 at 1e-4); soft
    max-pooling; with hard max-pooling, the iterate with the lowest loss (paper: the last). Total variation is squared,
    as in the published code; the text says absolute.
    """

    iterations: int = 2000
    learning_rate: float = 1.5e-4
    momentum: float = 0.99
    decay: Decay = "cosine"
    squared: float = 1.0
    wasserstein: float = 1.0
    cosine: float = 0.0
    total_variation: float = 1e-3
    variant: Literal["paper", "code"] = "paper"
    latent: int = 128
    softening: float = 0.1

    def __post_init__(self) -> None:
        require_choice("variant", self.variant, _DISTANCES)
        require_at_least(0, squared=self.squared, wasserstein=self.wasserstein, cosine=self.cosine)
        require_at_least(0, total_variation=self.total_variation, softening=self.softening)
        if not (self.squared or self.wasserstein or self.cosine):
            raise ValueError("expected squared, wasserstein or cosine > 0, got 0 for all; nothing would be matched")
        super().__post_init__()

    def matching(self) -> Matching:
        distances: tuple[tuple[float, Objective], ...] = (
            (self.squared, SquaredError()),
            (self.wasserstein, _DISTANCES[self.variant]),
            (self.cosine, Cosine()),
        )
        prior = (self.total_variation, TotalVariation(form="squared"))
        shared = self.shared()
        return replace(
            shared,
            matched=softened(shared.matched, "max-pooling", self.softening),
            objective=Sum(terms=tuple(term for term in distances if term[0])),
            priors=(prior,) if self.total_variation else (),
            labels=self.labels or Joint(),
            sought=UntrainedGenerator(latent=self.latent),
            optimizer=RmsProp(learning_rate=self.learning_rate, momentum=self.momentum, decay=self.decay),
        )
