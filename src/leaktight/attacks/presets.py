"""The published optimisation attacks, each a composition of the parts of `attacks/matching.py`.

Weights and step sizes are for images in [0, 1]. Papers that search in normalised space use a learning rate 1 / std,
about 4, times as large, and a weight of total variation so many times smaller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from leaktight.attacks.backends import Backend
from leaktight.attacks.descent import Adam
from leaktight.attacks.initial import Noise, Patterned, Start
from leaktight.attacks.labels import Given, Idlg, Joint, Yin
from leaktight.attacks.last_layer import LabelStrategy
from leaktight.attacks.lbfgs import Lbfgs
from leaktight.attacks.matched import Matched, OneBatch, Simulation
from leaktight.attacks.matching import Matching
from leaktight.attacks.objectives import Cosine, SquaredError, Sum
from leaktight.attacks.priors import BatchNormStatistics, L2Norm, TotalVariation
from leaktight.attacks.sought import Pixels
from leaktight.attacks.spread import Parallel
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge
from leaktight.core.types import Observation, Reconstruction

Local = Literal["simulate", "one_batch"]
_MATCHED: Mapping[str, Matched] = {"simulate": Simulation(), "one_batch": OneBatch()}


@dataclass(frozen=True, kw_only=True)
class Preset(ABC):
    """Settings that all optimisation attacks share.

    labels: how labels are found; None is the attack's own way.
    local: how a change after several local steps is matched. parallel: how restarts and victims are spread.
    """

    iterations: int = 300
    restarts: int = 1
    labels: LabelStrategy | None = None
    local: Local = "simulate"
    backend: Backend = "fx"
    precision: Literal["float32", "float64"] = "float32"
    parallel: Parallel = "auto"
    onednn: bool | None = None
    patience: int | None = None
    progress_every: int = 100

    def __post_init__(self) -> None:
        self.matching()

    @abstractmethod
    def matching(self) -> Matching:
        """The attack as a composition."""

    def composition(self) -> Matching | None:
        """The composition that `reconstruct` runs, if it runs nothing else; several victims then share its work."""
        return self.matching() if type(self).reconstruct is Preset.reconstruct else None

    @property
    def requires(self) -> frozenset[Knowledge]:
        return self.matching().requires

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        return self.matching().reconstruct(seen, rng=rng, progress=progress)

    def shared(self) -> Matching:
        """A composition with the shared settings, for the attack to complete."""
        return Matching(
            iterations=self.iterations,
            restarts=self.restarts,
            matched=_MATCHED[self.local],
            backend=self.backend,
            precision=self.precision,
            parallel=self.parallel,
            onednn=self.onednn,
            patience=self.patience,
            progress_every=self.progress_every,
        )


@dataclass(frozen=True, kw_only=True)
class Dlg(Preset):
    """Deep Leakage from Gradients: squared distance, image and label searched together, L-BFGS.

    Reference: Zhu et al. 2019. Assumes: the number of examples.
    Differs from the paper: a Wolfe line search in float64 instead of plain steps in float32 (`line_search = "none"`);
    up to `restarts` starts until the loss is below 1e-6.
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


@dataclass(frozen=True, kw_only=True)
class IdlgAttack(Dlg):
    """iDLG: the label is read from the last layer, then the image is searched as in DLG.

    Reference: Zhao et al. 2020. Assumes: one example, features that are not negative.
    """

    def own_labels(self) -> LabelStrategy | Joint:
        return Idlg()


@dataclass(frozen=True, kw_only=True)
class Cpl(IdlgAttack):
    """CPL: iDLG from a start that repeats one random patch.

    Reference: Wei et al. 2020. Differs from the paper: as DLG here; without the term that matches predictions, which
    the published code leaves out as well.
    """

    patch: int = 16

    def first_images(self) -> Start:
        return Patterned(patch=self.patch, distribution="uniform")


@dataclass(frozen=True, kw_only=True)
class CsDlg(Preset):
    """Cosine DLG: cosine distance with L-BFGS and known labels, as OUTPOST attacks.

    Reference: Wang et al. (OUTPOST), section on csDLG. Assumes: labels, the number of examples, the local training.
    Differs from the paper: Wolfe line search, float64 and a box; no total variation.
    """

    iterations: int = 150
    precision: Literal["float32", "float64"] = "float64"

    def matching(self) -> Matching:
        return replace(
            self.shared(),
            objective=Cosine(),
            labels=self.labels or Given(),
            sought=Pixels(start=Noise(distribution="uniform")),
            optimizer=Lbfgs(line_search="wolfe"),
        )


@dataclass(frozen=True, kw_only=True)
class InvertingGradients(Preset):
    """Inverting Gradients: cosine distance, total variation, signed Adam in a box.

    Reference: Geiping et al. 2020. Assumes: labels, the number of examples, the local training for model changes.
    """

    iterations: int = 4800
    learning_rate: float = 0.025
    total_variation: float = 4e-4

    def matching(self) -> Matching:
        return replace(
            self.shared(),
            objective=Cosine(),
            labels=self.labels or Given(),
            priors=((self.total_variation, TotalVariation()),),
            optimizer=Adam(learning_rate=self.learning_rate, slope="sign", decay="steps"),
        )


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


@dataclass(frozen=True, kw_only=True)
class PriorOnly(Preset):
    """Negative control: the same search by total variation alone, without a look at the update."""

    iterations: int = 500
    learning_rate: float = 0.025

    def matching(self) -> Matching:
        return replace(
            self.shared(),
            objective=None,
            labels=self.labels or Idlg(),
            priors=((1.0, TotalVariation()),),
            optimizer=Adam(learning_rate=self.learning_rate, slope="sign", decay="steps"),
        )
