"""GIAS: a search over the latents of a generator, then over its weights, one copy for each image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leaktight.attacks.generative.latent import GeneratorWeights, Latents
from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import Cosine
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.presets.preset import Preset
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, Reconstruction
from leaktight.models.gan import GeneratorSource


@dataclass(frozen=True, kw_only=True)
class Gias(Preset):
    """GIAS: searches a generator's latents from several starts, then the weights of one generator per image.

    generator: the one to start from. latent_iterations, latent_learning_rate: of the first phase, which has all the
    restarts. iterations, learning_rate: of the second phase, with the latents fixed. total_variation: its weight.
    Reference: Jeon et al. 2021. Assumes: labels, the number of examples, a generator of such images.
    Differs from the paper: batch norm of the generator keeps the statistics of its file; the weight of total variation
    is for images in [0, 1].
    """

    generator: GeneratorSource
    iterations: int = 5000
    restarts: int = 3
    latent_iterations: int = 500
    latent_learning_rate: float = 3e-2
    learning_rate: float = 1e-3
    total_variation: float = 4e-6

    def __post_init__(self) -> None:
        self.second(self.matching(), torch.empty(0))

    def matching(self) -> Matching:
        """The first phase."""
        return replace(
            self.shared(),
            objective=Cosine(),
            labels=self.labels or Given(),
            priors=((self.total_variation, TotalVariation()),),
            sought=Latents(generator=self.generator),
            optimizer=Adam(learning_rate=self.latent_learning_rate),
            iterations=self.latent_iterations,
        )

    def second(self, first: Matching, latents: Tensor) -> Matching:
        """The second phase, with the latents found by `first`, (N, L)."""
        return replace(
            first,
            sought=GeneratorWeights(generator=self.generator, latents=latents),
            optimizer=Adam(learning_rate=self.learning_rate),
            iterations=self.iterations,
            restarts=1,
        )

    def composition(self) -> Matching | None:
        return None

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        attack = self.matching()
        evidence = attack.settled(attack.evidence(seen, rng=rng), rng=rng)
        first = attack.search(evidence, rng=rng.child("latents"), progress=progress).search

        def later(iteration: int, loss: float, guess: Tensor | None) -> None:
            if progress is not None:
                progress(self.latent_iterations + iteration, loss, guess)

        again = self.second(attack, first.best.variables["latents"])
        found = again.search(evidence, rng=rng.child("weights"), progress=None if progress is None else later)
        answer = again.answer(evidence, found)
        notes = {**answer.notes, "latent_loss": first.best.loss}
        return replace(answer, notes=notes, first_loss=attack.optimizer.first_loss(first.candidates))
