"""csDLG: DLG with the cosine distance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import Cosine
from leaktight.attacks.matching.sought import Noise, Pixels
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.attacks.presets.preset import Preset


@dataclass(frozen=True, kw_only=True)
class CsDlg(Preset):
    """Cosine DLG: cosine distance with L-BFGS and known labels, as OUTPOST attacks.

    coarse: iterations of a first search for images of half the height and width, >= 0; restarts are then of that one.
    Reference: Wang et al. (OUTPOST), section on csDLG. Assumes: labels, the number of examples, the local training.
    Differs from the paper: Wolfe line search, float64 and a box; no total variation.
    """

    iterations: int = 150
    precision: Literal["float32", "float64"] = "float64"
    coarse: int = 0

    def matching(self) -> Matching:
        return replace(
            self.shared(),
            objective=Cosine(),
            labels=self.labels or Given(),
            sought=Pixels(start=Noise(distribution="uniform"), coarse=self.coarse),
            optimizer=Lbfgs(line_search="wolfe"),
        )
