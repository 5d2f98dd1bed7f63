"""The base of published attacks that are compositions of the matching loop.

Weights and learning rates of presets are for images in [0, 1]. Papers that search in normalised space have a learning
rate 1 / std (about 4) times as large, and a weight of total variation as many times smaller.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import rule_for
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.spread import Parallel
from leaktight.attacks.matching.view import Matched, OneBatch, Simulation
from leaktight.attacks.optimizers.compile import BackendSetting
from leaktight.core.protocols import Attack, LabelSource, Progress
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge
from leaktight.core.types import Observation, Reconstruction

LocalMatch = Literal["simulate", "one_batch"]
_MATCHED: Mapping[str, Matched] = {"simulate": Simulation(), "one_batch": OneBatch()}


@dataclass(frozen=True, kw_only=True)
class Preset(Attack):
    """Settings that all optimisation attacks share; `Matching` says more of each.

    iterations: of each restart. restarts: independent starts; the one with the lowest loss is the answer.
    labels: how labels are found; None: the attack's own strategy.
    local: a change after several local steps is matched by simulating them ("simulate") or as one step ("one_batch").
    backend: how an iteration is run, "eager", "fx" (traced) or "inductor" (compiled); "auto": compiled if worth it.
    precision: of the search.
    parallel: restarts as one function ("vmap"), in "processes", or one after another ("none").
    onednn: whether convolutions use oneDNN; None: a few timed iterations decide.
    patience: stop when the loss has not fallen by 1 % in this many iterations (L-BFGS: evaluations); None: never.
    check_every: iterations (L-BFGS: evaluations) between two such checks.
    progress_every: iterations between two reports of progress; it changes no result.
    """

    iterations: int = 300
    restarts: int = 1
    labels: LabelStrategy | None = None
    local: LocalMatch = "simulate"
    backend: BackendSetting = "auto"
    precision: Literal["float32", "float64"] = "float32"
    parallel: Parallel = "auto"
    onednn: bool | None = None
    patience: int | None = None
    check_every: int = 100
    progress_every: int = 100

    def __post_init__(self) -> None:
        self.matching()

    @abstractmethod
    def matching(self) -> Matching:
        """The attack as a composition."""

    def composition(self) -> Matching | None:
        """The composition, if `reconstruct` runs nothing else, so that it can be adapted to a defense; else None."""
        return self.matching()

    @property
    def requires(self) -> frozenset[Knowledge]:
        return self.matching().requires

    @property
    def labels_from(self) -> LabelSource:
        return self.matching().labels_from

    @property
    def joins_rounds(self) -> bool:
        return self.matching().joins_rounds

    def pinned(self, *, onednn: bool) -> Self:
        return replace(self, onednn=onednn if self.onednn is None else self.onednn, progress_every=1)

    def fitted(self, seen: Observation) -> Self:
        """Use a label rule if labels are not disclosed, and match one step if local training is not."""
        return replace(
            self,
            labels=rule_for(seen) if self.labels is None and self.wants_labels else self.labels,
            local="one_batch" if seen.num_steps is None else self.local,
        )

    @property
    def wants_labels(self) -> bool:
        """Whether the attack's own strategy needs disclosed labels, so that `fitted` replaces it by a rule."""
        return Knowledge.LABELS in self.requires

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        return self.matching().reconstruct(seen, rng=rng, progress=progress)

    def shared(self) -> Matching:
        """A composition with the shared settings only; the attack adds its own."""
        return Matching(
            iterations=self.iterations,
            restarts=self.restarts,
            matched=_MATCHED[self.local],
            backend=self.backend,
            precision=self.precision,
            parallel=self.parallel,
            onednn=self.onednn,
            patience=self.patience,
            check_every=self.check_every,
            progress_every=self.progress_every,
        )
