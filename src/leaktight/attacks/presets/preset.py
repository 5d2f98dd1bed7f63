"""What published attacks share: settings that complete a composition of the matching loop.

Weights and step sizes of presets are for images in [0, 1]. Papers that search in normalised space use a learning rate
1 / std, about 4, times as large, and a weight of total variation so many times smaller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.spread import Parallel
from leaktight.attacks.matching.view import Matched, OneBatch, Simulation
from leaktight.attacks.optimizers.compile import Backend
from leaktight.core.protocols import Attack, Progress
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge
from leaktight.core.types import Observation, Reconstruction

Local = Literal["simulate", "one_batch"]
_MATCHED: Mapping[str, Matched] = {"simulate": Simulation(), "one_batch": OneBatch()}


@dataclass(frozen=True, kw_only=True)
class Preset(Attack, ABC):
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
