"""GradInversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from leaktight.attacks.labels.rules import Yin
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import Cosine, SquaredError, Sum
from leaktight.attacks.matching.priors import BatchNormStatistics, L2Norm, TotalVariation
from leaktight.attacks.matching.slopes import Slopes
from leaktight.attacks.optimizers.descent import Adam, Slope
from leaktight.attacks.presets.preset import Preset
from leaktight.models.source import require_choice

Variant: TypeAlias = Literal["repaired", "paper"]


class _Form(NamedTuple):
    """What a variant is made of, and the weights that it has where none are set."""

    slopes: Slopes
    statistics: BatchNormStatistics
    slope: Slope
    learning_rate: float
    total_variation: float
    l2: float


_FORMS: Mapping[str, _Form] = {
    "repaired": _Form(
        "observed",
        BatchNormStatistics(form="relative", first_layer_weight=1.0, estimated=False),
        "sign",
        0.1,
        0.3,
        1e-6,
    ),
    "paper": _Form("guessed", BatchNormStatistics(), "plain", 0.025, 4e-4, 1e-6),
}


@dataclass(frozen=True, kw_only=True)
class GradInversion(Preset):
    """GradInversion: distance of updates, batch-norm statistics, total variation, restarts drawn to their consensus.

    variant: "repaired", the cosine with the slopes of the loss as observed (`slopes.py`), the batch's own statistics
        where buffers were sent, signed steps; "paper", the squared distance, which has no say where a trained network's
        gradient is small, and running statistics where none were sent. The paper has 20 000 iterations.
    learning_rate: of the search; None, the variant's own. total_variation, l2: weights of these priors; None, the same.
    distance: weight of the squared distance of "paper". batch_norm: weight of the batch-norm statistics.
    consensus: weight of the term that draws restarts to their mean. langevin: noise added at each step.
    Reference: Yin et al. 2021, with the weights of a public reimplementation. Assumes: labels that are all different.
    Cannot: find images of a batch whose gradient others exceed by more than rounding lets through.
    """

    iterations: int = 2000
    restarts: int = 2
    variant: Variant = "repaired"
    learning_rate: float | None = None
    distance: float = 1e-4
    total_variation: float | None = None
    l2: float | None = None
    batch_norm: float = 0.1
    consensus: float = 1e-2
    langevin: float = 0.01

    def __post_init__(self) -> None:
        require_choice("variant", self.variant, _FORMS)
        super().__post_init__()

    def matching(self) -> Matching:
        form = _FORMS[self.variant]
        squared = Sum(terms=((self.distance / 2, SquaredError()),))
        return replace(
            self.shared(),
            objective=squared if self.variant == "paper" else Cosine(),
            slopes=form.slopes,
            labels=self.labels or Yin(),
            priors=(
                (_or(self.total_variation, form.total_variation), TotalVariation()),
                (_or(self.l2, form.l2), L2Norm()),
                *(((self.batch_norm, form.statistics),) if self.batch_norm else ()),
            ),
            optimizer=Adam(
                learning_rate=_or(self.learning_rate, form.learning_rate),
                slope=form.slope,
                decay="cosine",
                warm_up=50,
                langevin=self.langevin,
            ),
            consensus=self.consensus if self.restarts > 1 else 0.0,
        )


def _or(value: float | None, own: float) -> float:
    return own if value is None else value
