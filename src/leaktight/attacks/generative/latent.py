"""Search spaces of a trained generator: its latents (GGL, GIAS), or its weights, one copy per image (GIAS)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from leaktight.attacks.matching.sought import SearchSpace, Sought
from leaktight.attacks.matching.view import Evidence, cast
from leaktight.attacks.optimizers.optimizer import Tree
from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.inputs import Images
from leaktight.core.rng import Rng
from leaktight.core.text import sides
from leaktight.models.gan import GeneratorSource
from leaktight.models.source import require_choice

LatentStart: TypeAlias = Literal["normal", "uniform"]

_STARTS: Mapping[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "uniform": lambda shape, generator: torch.rand(shape, generator=generator),
}


@dataclass(frozen=True, kw_only=True)
class Latents(Sought):
    """One latent of a generator for each image.

    squash: apply tanh to the variables, so that latents stay in (-1, 1) (GGL's code).
    kl: weight, >= 0, of the divergence from N(0, 1) of a normal distribution fitted to a latent (GGL's paper).
    start: first values, "normal" N(0, 1) or "uniform" U(0, 1).
    """

    generator: GeneratorSource
    squash: bool = False
    kl: float = 0.0
    start: LatentStart = "normal"

    def __post_init__(self) -> None:
        require_choice("start", self.start, _STARTS)
        require_at_least(0, kl=self.kl)

    def space(self, evidence: Evidence, rng: Rng, precision: torch.dtype) -> SearchSpace:
        return _LatentSpace(self, evidence, precision)


@dataclass(frozen=True, kw_only=True)
class GeneratorWeights(Sought):
    """The weights of a generator, one copy for each image, starting from those of its file.

    latents: the fixed latent of each image, (N, L). Batch norm uses the statistics of the file.
    """

    generator: GeneratorSource
    latents: Tensor

    def space(self, evidence: Evidence, rng: Rng, precision: torch.dtype) -> SearchSpace:
        return _WeightSpace(self, evidence, precision)


class _GeneratorSpace(SearchSpace):
    """Images made by a generator; its weights, statistics and the classes of the images are constants."""

    def __init__(self, source: GeneratorSource, evidence: Evidence, precision: torch.dtype) -> None:
        self.generator = source.read()
        self.size = Images(*evidence.shape)
        self.generator.check_fits(self.size, evidence.num_classes)
        constants: Tree = {
            "weights": cast(self.generator.weights, precision),
            "statistics": cast(self.generator.statistics, precision),
        }
        if self.generator.num_classes is not None:
            constants["classes"] = _classes(evidence)
        super().__init__(evidence, precision, constants)


class _LatentSpace(_GeneratorSpace):
    def __init__(self, settings: Latents, evidence: Evidence, precision: torch.dtype) -> None:
        super().__init__(settings.generator, evidence, precision)
        self.settings = settings

    def draw(self, rng: Rng) -> Tree:
        shape = (self.shape[0], self.generator.latent)
        return {"latents": _STARTS[self.settings.start](shape, rng.child("latents").public()).to(self.precision)}

    def latents(self, variables: Tree) -> Tensor:
        """The input of the generator."""
        found: Tensor = variables["latents"]
        return found.tanh() if self.settings.squash else found

    def images(self, variables: Tree, constants: Tree) -> Tensor:
        made = self.generator.images(
            constants["weights"], constants["statistics"], self.latents(variables), constants.get("classes")
        )
        return self.generator.fitted(made, self.size)

    def penalty(self, variables: Tree, constants: Tree) -> Tensor | None:
        return self.settings.kl * divergence(self.latents(variables)) if self.settings.kl else None


class _WeightSpace(_GeneratorSpace):
    def __init__(self, settings: GeneratorWeights, evidence: Evidence, precision: torch.dtype) -> None:
        super().__init__(settings.generator, evidence, precision)
        wanted = (evidence.num_examples, self.generator.latent)
        if tuple(settings.latents.shape) != wanted:
            raise UsageError(f"expected latents {sides(wanted)}, got {sides(settings.latents.shape)}")
        self.first = self.constants.pop("weights")
        self.constants["latents"] = settings.latents.detach().to(precision)

    def draw(self, rng: Rng) -> Tree:
        return {
            f"{place}:{name}": tensor.clone() for place in range(self.shape[0]) for name, tensor in self.first.items()
        }

    def images(self, variables: Tree, constants: Tree) -> Tensor:
        made = []
        for place in range(self.shape[0]):
            weights = {name: variables[f"{place}:{name}"] for name in self.first}
            asked = (constants[name][place : place + 1] for name in ("latents", "classes") if name in constants)
            made.append(self.generator.images(weights, constants["statistics"], *asked))
        return self.generator.fitted(torch.cat(made), self.size)


def divergence(latents: Tensor) -> Tensor:
    """The mean over latents (N, L) of KL(N(m, v) || N(0, 1)), with m and v the mean and variance of a latent's entries.

    >>> round(float(divergence(torch.tensor([[2.0, 0.0]]))), 6)  # m = v = 1
    0.5
    """
    variance, mean = torch.var_mean(latents, 1, correction=0)
    return 0.5 * (mean.square() + variance - 1 - (variance + 1e-10).log()).mean()


def _classes(evidence: Evidence) -> Tensor:
    if evidence.labels is None:
        raise UsageError(
            "expected known labels for a class-conditional generator, got labels to search for; use idlg or given"
        )
    return evidence.labels
