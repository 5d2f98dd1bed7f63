"""GradInversion."""

from __future__ import annotations

from dataclasses import dataclass, replace

from leaktight.attacks.labels.rules import Yin
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import SquaredError, Sum
from leaktight.attacks.matching.priors import BatchNormStatistics, L2Norm, TotalVariation
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.presets.preset import Preset


@dataclass(frozen=True, kw_only=True)
class GradInversion(Preset):
    """GradInversion: squared distance, batch-norm statistics, total variation, restarts drawn to their consensus.

    Reference: Yin et al. 2021, with the weights of a public reimplementation. Assumes: labels that are all different.
    Differs from the paper: the consensus is the mean of the restarts, without registration.
    """

    iterations: int = 20000
    restarts: int = 2
    learning_rate: float = 0.025
    distance: float = 1e-4
    total_variation: float = 4e-4
    l2: float = 1e-6
    batch_norm: float = 0.1
    consensus: float = 1e-2
    langevin: float = 0.01

    def matching(self) -> Matching:
        statistics = ((self.batch_norm, BatchNormStatistics()),) if self.batch_norm else ()
        return replace(
            self.shared(),
            objective=Sum(terms=((self.distance / 2, SquaredError()),)),
            labels=self.labels or Yin(),
            priors=((self.total_variation, TotalVariation()), (self.l2, L2Norm()), *statistics),
            optimizer=Adam(learning_rate=self.learning_rate, decay="cosine", warm_up=50, langevin=self.langevin),
            consensus=self.consensus if self.restarts > 1 else 0.0,
        )
