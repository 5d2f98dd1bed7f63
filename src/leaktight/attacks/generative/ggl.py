"""GGL: a search over the latents of a generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from leaktight.attacks.generative.latent import Latents
from leaktight.attacks.generative.transforms import AsSeen, Expected
from leaktight.attacks.labels.rules import Idlg
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import SquaredError
from leaktight.attacks.optimizers.bayesian import Bayesian
from leaktight.attacks.optimizers.derivative_free import CmaEs
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.optimizer import Optimizer
from leaktight.attacks.presets.preset import Preset
from leaktight.core.threat import Knowledge
from leaktight.models.gan import GeneratorSource
from leaktight.models.source import require_choice

Regulariser: TypeAlias = Literal["tanh", "kl", "none"]


@dataclass(frozen=True, kw_only=True)
class Ggl(Preset):
    """GGL: searches a generator's latent for an image that explains the update, by CMA-ES, Adam or a Gaussian process.

    generator: whose latents are searched. optimizer: "cma_es", "adam" or "bayesian".
    iterations: each evaluates `population` points with CMA-ES, 10 with "bayesian", one with Adam.
    regulariser: "tanh", latents in (-1, 1); "kl", the divergence from N(0, 1) with weight `kl`; "none"; None: "tanh"
    for CMA-ES and "kl" for the others. learning_rate: of Adam.
    expects: a defense that is also applied to guesses, with the strength estimated from the update.
    Reference: Li et al. 2022. Assumes: one example (labels as iDLG), or other labels; a generator of such images; the
    defense, if one is expected.
    Differs from the paper: Adam's rate has a warm-up and then falls as a cosine; the Gaussian process is
    scikit-learn's, in a trust region as in TuRBO-1, with expected improvement.
    """

    generator: GeneratorSource
    iterations: int = 500
    optimizer: Literal["cma_es", "adam", "bayesian"] = "cma_es"
    population: int = 50
    learning_rate: float = 0.1
    regulariser: Regulariser | None = None
    kl: float = 0.1
    expects: Expected = "none"

    def __post_init__(self) -> None:
        require_choice("optimizer", self.optimizer, _OPTIMIZERS)
        if self.regulariser is not None:
            require_choice("regulariser", self.regulariser, get_args(Regulariser))
        super().__post_init__()

    def matching(self) -> Matching:
        shared = self.shared()
        chosen = self.regulariser or ("tanh" if self.optimizer == "cma_es" else "kl")
        return replace(
            shared,
            matched=AsSeen(inner=shared.matched, defense=self.expects),
            objective=SquaredError(reduction="layer_mean"),
            labels=self.labels or Idlg(),
            sought=Latents(
                generator=self.generator,
                squash=chosen == "tanh",
                kl=self.kl if chosen == "kl" else 0.0,
                start="uniform" if self.optimizer == "cma_es" else "normal",
            ),
            optimizer=_OPTIMIZERS[self.optimizer](self),
        )

    @property
    def requires(self) -> frozenset[Knowledge]:
        facts = super().requires
        return facts if self.expects == "none" else facts | {Knowledge.DEFENSE}


_OPTIMIZERS: Mapping[str, Callable[[Ggl], Optimizer]] = {
    "cma_es": lambda ggl: CmaEs(population=ggl.population),
    "adam": lambda ggl: Adam(learning_rate=ggl.learning_rate, decay="cosine", warm_up=ggl.iterations // 20),
    "bayesian": lambda ggl: Bayesian(),
}
