"""THE matching loop: search for examples whose update is the one that was seen.

An attack is a composition: what is sought, what is matched, an objective, priors, a label strategy, an optimiser,
restarts. Every published attack is a preset of these (`attacks/presets`). The answer is chosen by the attack's own
loss. A whole iteration is one pure function of tensors (`problem.py`), traced once; restarts and victims run side by
side (`spread.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import Idlg, Joint
from leaktight.attacks.matching.objectives import Cosine, Objective
from leaktight.attacks.matching.problem import PRECISIONS, Found, Prior, Problem, VictimProgress
from leaktight.attacks.matching.sought import Pixels, Sought
from leaktight.attacks.matching.spread import Parallel, search_all
from leaktight.attacks.matching.view import Matched, Simulation, View
from leaktight.attacks.optimizers.compile import Backend
from leaktight.attacks.optimizers.derivative_free import DerivativeFree
from leaktight.attacks.optimizers.descent import Adam, FirstOrder
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Attack, Progress, require_seen
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Batch, Observation, Reconstruction


@dataclass(frozen=True, kw_only=True)
class Matching(Attack):
    """Search for images that explain an update, by a composition of parts.

    objective: the distance between updates (None: priors alone, a negative control that ignores the update).
    priors: pairs of weight and prior. labels: how labels are inferred, or `Joint` to search for them too.
    sought: what the search moves in place of the examples: pixels, or what makes them.
    restarts: independent starts; the one with the lowest loss is the answer.
    consensus: the weight that draws restarts to their common mean (GradInversion).
    keep: answer with the "best" iterate by the attack's own loss, or the "last".
    patience: stop when the loss has not fallen by 1 % in so many iterations (None: never).
    stop_below: stop at such a loss. check_every: iterations (L-BFGS: evaluations) between two looks at whether to stop.
    progress_every: how often `progress` is called; it changes no result.
    parallel: how restarts, and the victims of `reconstruct_all`, are spread: as one traced function ("vmap"), over
    "processes", or in turn ("none"); "auto" takes vmap for small networks and processes for long work on wide ones.
    onednn: None lets a few timed iterations decide; fix it to get the same bits on every machine of a kind.
    Assumes: the number of examples (BATCH_SIZE), and what its parts assume.
    """

    objective: Objective | None = Cosine()
    matched: Matched = Simulation()
    priors: tuple[tuple[float, Prior], ...] = ()
    labels: LabelStrategy | Joint = Idlg()
    sought: Sought = Pixels()
    optimizer: FirstOrder | Lbfgs | DerivativeFree = Adam(slope="sign", decay="steps")
    iterations: int = 4800
    restarts: int = 1
    consensus: float = 0.0
    keep: Literal["best", "last"] = "best"
    backend: Backend = "fx"
    precision: Literal["float32", "float64"] = "float32"
    parallel: Parallel = "auto"
    onednn: bool | None = None
    patience: int | None = None
    stop_below: float | None = None
    check_every: int = 100
    progress_every: int = 100

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts", "check_every", "progress_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.consensus and self.restarts < 2:
            raise ValueError("consensus draws restarts together; set restarts to 2 or more")
        if self.parallel == "vmap" and not isinstance(self.optimizer, FirstOrder):
            kind = "L-BFGS" if isinstance(self.optimizer, Lbfgs) else "a search without derivatives"
            raise ValueError(f'expected parallel "auto", "processes" or "none" with {kind}, got "vmap"')

    @property
    def separable(self) -> bool:
        """Whether restarts do not need one another, and may run in different processes."""
        return not self.consensus and (self.stop_below is None or isinstance(self.optimizer, FirstOrder))

    @property
    def requires(self) -> frozenset[Knowledge]:
        return self.labels.requires | {Knowledge.BATCH_SIZE}

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        """Find the examples behind one update, or behind several updates of the same examples."""
        return self.solve(self.problem(seen, rng=rng), rng=rng, progress=progress)

    def problem(self, seen: Sequence[Observation], *, rng: Rng) -> Problem:
        """What these observations are to be explained by."""
        first = require_seen(self, seen)
        for each in seen:
            require(each, Knowledge.BATCH_SIZE)
        number = first.batch_size or 0
        if any(each.batch_size != number for each in seen):
            raise UsageError("these observations are of different numbers of examples; attack them one at a time")
        labels = None
        if isinstance(self.labels, LabelStrategy):
            labels = self.labels.infer(first, number, rng=rng.child("labels"))
        views = [(1.0, self.view(each), tuple(range(number))) for each in seen]
        return Problem(views, labels, number, first.inputs.shape, first.num_classes)

    def view(self, seen: Observation) -> View:
        """An observation as this attack matches it."""
        scale_free = self.objective is None or self.objective.scale_free
        return self.matched.view(seen, seen.batch_size or 0, PRECISIONS[self.precision], needs_scale=not scale_free)

    def solve(self, problem: Problem, *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        """Run the search itself."""
        told = None if progress is None else _without_victim(progress)
        return self.solve_all([problem], rngs=[rng], progress=told)[0]

    def found(self, problem: Problem, *, rng: Rng, progress: Progress | None = None) -> Found:
        """The same, with all that the restarts have found in place of an answer: for attacks in several phases."""
        kept: list[Found] = []
        told = None if progress is None else _without_victim(progress)
        search_all(self, [problem], [rng], workers=None, progress=told, done=lambda *found: kept.append(found[-1]))
        return kept[0]

    def solve_all(
        self,
        problems: Iterable[Problem],
        *,
        rngs: Sequence[Rng],
        workers: int | None = None,
        progress: VictimProgress | None = None,
        done: Callable[[int, Reconstruction], None] = lambda place, answer: None,
    ) -> list[Reconstruction]:
        """The same for several victims at once, one for each of `rngs`; see `attacks.many.reconstruct_all`."""
        answers: dict[int, Reconstruction] = {}

        def found(place: int, problem: Problem, what: Found) -> None:
            answers[place] = self._answer(problem, what)
            done(place, answers[place])

        search_all(self, problems, rngs, workers=workers, progress=progress, done=found)
        return [answers[place] for place in range(len(rngs))]

    def _answer(self, problem: Problem, found: Found) -> Reconstruction:
        best = found.best
        images = best.images.detach().to(torch.float32)
        counts = [candidate.iterations for candidate in found.candidates]
        notes = {
            "losses": [candidate.loss for candidate in found.candidates],
            "assumed": sorted({note for _, view, _ in problem.views for note in view.notes}),
            **({"iterations": max(counts)} if isinstance(self.optimizer, FirstOrder) else {"evaluations": sum(counts)}),
            "backend": found.backend,
            "onednn": found.onednn,
        }
        return Reconstruction(Batch(images, best.labels), best.loss, notes)


def _without_victim(progress: Progress) -> VictimProgress:
    def told(victim: int, iteration: int, loss: float, guess: Tensor | None) -> None:
        progress(iteration, loss, guess)

    return told
