"""Inverting Gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import Cosine
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.slopes import Slopes
from leaktight.attacks.matching.soft import softened
from leaktight.attacks.matching.sought import Pixels
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.first_order import Decay
from leaktight.attacks.presets.preset import Preset
from leaktight.core.errors import require_at_least


@dataclass(frozen=True, kw_only=True)
class InvertingGradients(Preset):
    """Inverting Gradients: cosine distance, total variation, signed Adam in a box.

    learning_rate: of Adam. decay: how it falls over the iterations. total_variation: the prior's weight.
    slopes: of the loss by the logits, "guessed" or "observed" in the last layer's gradient.
    coarse: iterations of a first search for images of half the height and width, >= 0; restarts are then of that one.
    soft_relus: the first temperature of soft ReLUs in guesses, in units of what enters each on images of noise, which
    falls to a fifteenth, in the coarse search too; 0: ReLUs stay as they are. It harms on trained networks.

    Reference: Geiping et al. 2020. Assumes: labels, the number of examples, the local training for model changes.
    """

    iterations: int = 4800
    learning_rate: float = 0.025
    total_variation: float = 4e-4
    decay: Decay = "steps"
    slopes: Slopes = "observed"
    coarse: int = 0
    soft_relus: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, soft_relus=self.soft_relus)
        super().__post_init__()

    def matching(self) -> Matching:
        shared = self.shared()
        return replace(
            shared,
            matched=softened(shared.matched, "relu", self.soft_relus),
            objective=Cosine(),
            labels=self.labels or Given(),
            slopes=self.slopes,
            priors=((self.total_variation, TotalVariation()),),
            sought=Pixels(coarse=self.coarse),
            optimizer=Adam(learning_rate=self.learning_rate, slope="sign", decay=self.decay),
        )
