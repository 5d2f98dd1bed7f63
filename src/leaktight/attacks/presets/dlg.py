"""Deep Leakage from Gradients (DLG)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import Joint
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import SquaredError
from leaktight.attacks.matching.sought import Noise, Pixels, Start
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.attacks.presets.preset import Preset


@dataclass(frozen=True, kw_only=True)
class Dlg(Preset):
    """Deep Leakage from Gradients: squared distance, image and label searched together, L-BFGS.

    line_search: of L-BFGS, "wolfe" or "none". box: whether pixels stay in [0, 1].

    Reference: Zhu et al. 2019. Assumes: the number of examples.
    Differs from the paper: a Wolfe line search in float64 instead of plain steps in float32 (`line_search = "none"`);
    up to `restarts` restarts, until the loss is below 1e-6.
    """

    restarts: int = 3
    precision: Literal["float32", "float64"] = "float64"
    line_search: Literal["none", "wolfe"] = "wolfe"
    box: bool = False

    def matching(self) -> Matching:
        return replace(
            self.shared(),
            objective=SquaredError(),
            labels=self.labels or self.own_labels(),
            sought=Pixels(start=self.first_images(), box=self.box),
            optimizer=Lbfgs(line_search=self.line_search),
            stop_below=1e-6,
        )

    def own_labels(self) -> LabelStrategy | Joint:
        return Joint()

    def first_images(self) -> Start:
        return Noise(distribution="standard_normal")
