"""Deep Leakage from Gradients (DLG)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import Joint
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import SquaredError
from leaktight.attacks.matching.sought import Noise, Pixels, Start
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.attacks.optimizers.optimizer import Optimizer
from leaktight.attacks.presets.preset import Preset


@dataclass(frozen=True, kw_only=True)
class Dlg(Preset):
    """Deep Leakage from Gradients: squared distance, image and label searched together, L-BFGS.

    line_search: of L-BFGS, "wolfe" or "none". box: whether pixels stay in [0, 1].
    optimizer: "lbfgs"; or "adam", the DLG-Adam of AGIC's tables, for networks on which L-BFGS stops early; it makes
    all iterations. learning_rate: of Adam.

    Reference: Zhu et al. 2019. Assumes: the number of examples.
    Differs from the paper: a Wolfe line search in float64 instead of plain steps in float32 (`line_search = "none"`);
    up to `restarts` restarts, until the loss is below 1e-6.
    """

    restarts: int = 3
    precision: Literal["float32", "float64"] = "float64"
    line_search: Literal["none", "wolfe"] = "wolfe"
    box: bool = False
    optimizer: Literal["lbfgs", "adam"] = "lbfgs"
    learning_rate: float = 0.025

    def matching(self) -> Matching:
        return replace(
            self.shared(),
            objective=SquaredError(),
            labels=self.labels or self.own_labels(),
            sought=Pixels(start=self.first_images(), box=self.box),
            optimizer=self._optimizer(),
            stop_below=1e-6 if self.optimizer == "lbfgs" else None,
        )

    def _optimizer(self) -> Optimizer:
        if self.optimizer == "lbfgs":
            return Lbfgs(line_search=self.line_search)
        # The squared change of a few steps at a small rate is below Adam's usual epsilon.
        return Adam(learning_rate=self.learning_rate, epsilon=1e-20)

    def own_labels(self) -> LabelStrategy | Joint:
        return Joint()

    def first_images(self) -> Start:
        return Noise(distribution="standard_normal")
