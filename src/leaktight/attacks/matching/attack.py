"""THE matching loop: search for examples whose update is the one that was seen.

An attack is a composition: what is sought, what is matched, an objective, priors, a label strategy, an optimiser,
restarts. Every published attack is a preset of these (`attacks/presets`). The answer is chosen by the attack's own
loss. A whole iteration is one pure function of tensors (`problem.py`), traced once.

From a preset's `reconstruct` to the first iteration: `Matching.reconstruct` reads the update (`evidence`), `search`
spreads the restarts (`spread.py`), `run_all` runs them here or in processes, `_run` makes the `MatchingProblem`, and
the optimiser's `minimize` loops. `Lbfgs` and the optimisers without derivatives have one function more, for one restart
(`lbfgs.wolfe` or `plain`, `DerivativeFree._restart`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

from torch import Tensor

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import Idlg, Joint
from leaktight.attacks.matching.objectives import Cosine, Objective
from leaktight.attacks.matching.problem import PRECISIONS, MatchingProblem, Prior, constants_of
from leaktight.attacks.matching.sought import Pixels, Sought
from leaktight.attacks.matching.spread import Parallel, Workload, choose
from leaktight.attacks.matching.view import Evidence, Matched, Simulation, View
from leaktight.attacks.optimizers.compile import Backend
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.optimizer import Optimizer, SearchResult, SearchSettings
from leaktight.attacks.optimizers.trees import Tree
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Attack, LabelSource, Progress, require_seen
from leaktight.core.rng import Rng, global_seed
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.runtime.executor import Tell
from leaktight.runtime.processes import available_cores, in_worker, run_all

Message: TypeAlias = tuple[int, float, Tensor | None]
"""What a search tells on its way: the iteration, the loss, the best guess."""


@dataclass(frozen=True)
class Found:
    """What a search found: the result of all its restarts, and the examples that the best of them stands for."""

    result: SearchResult
    guess: Batch


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
    parallel: how restarts are spread: as one traced function ("vmap"), over "processes", or in turn ("none"); "auto"
    takes vmap for small networks and processes for long work on wide ones.
    onednn: None lets a few timed iterations decide; fix it to get the same bits on every machine of a kind.
    Assumes: the number of examples (BATCH_SIZE), and what its parts assume.
    """

    objective: Objective | None = Cosine()
    matched: Matched = Simulation()
    priors: tuple[tuple[float, Prior], ...] = ()
    labels: LabelStrategy | Joint = Idlg()
    sought: Sought = Pixels()
    optimizer: Optimizer = Adam(slope="sign", decay="steps")
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
        if self.parallel == "vmap" and not self.optimizer.abreast:
            kind = type(self.optimizer).__name__
            raise ValueError(f'expected parallel "auto", "processes" or "none" with {kind}, got "vmap"')

    @property
    def requires(self) -> frozenset[Knowledge]:
        return self.labels.requires | {Knowledge.BATCH_SIZE}

    @property
    def labels_from(self) -> LabelSource:
        return self.labels.source

    def pinned(self, *, onednn: bool) -> Self:
        return replace(self, onednn=onednn if self.onednn is None else self.onednn, progress_every=1)

    @property
    def workload(self) -> Workload:
        """What there is to spread. Restarts are separable if they do not need one another."""
        optimizer = self.optimizer
        return Workload(
            restarts=self.restarts,
            steps=self.iterations * optimizer.steps_per_iteration,
            abreast=optimizer.abreast and self.sought.abreast,
            separable=not self.consensus and (self.stop_below is None or optimizer.abreast),
        )

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        """Find the examples behind one update, or behind several updates of the same examples."""
        evidence = self.evidence(seen, rng=rng)
        return self.answer(evidence, self.search(evidence, rng=rng, progress=progress))

    def evidence(self, seen: Sequence[Observation], *, rng: Rng) -> Evidence:
        """What these observations are, with their labels, if those are not searched for."""
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
        return Evidence(views, labels, number, first.inputs.shape, first.num_classes)

    def view(self, seen: Observation) -> View:
        """An observation as this attack matches it."""
        scale_free = self.objective is None or self.objective.scale_free
        return self.matched.view(seen, seen.batch_size or 0, PRECISIONS[self.precision], needs_scale=not scale_free)

    def search(self, evidence: Evidence, *, rng: Rng, progress: Progress | None = None) -> Found:
        """What the restarts find."""
        load = self.workload
        way, workers = choose(load, evidence, self.parallel, 1 if in_worker() else available_cores())
        numbers = range(self.restarts)
        groups = [[number] for number in numbers] if way == "processes" and load.separable else [list(numbers)]
        jobs = [Job(self, evidence, rng, group, way == "vmap", progress is not None) for group in groups]
        return _joined(run_all(_run, jobs, workers=workers, told=_best_of_all(progress, len(jobs))))

    def problem(self, evidence: Evidence, rng: Rng, restarts: Sequence[int], *, together: bool) -> MatchingProblem:
        """What the optimiser minimises. restarts: their numbers. together: as one traced function under vmap."""
        form = self.sought.form(evidence, rng.child("sought"), PRECISIONS[self.precision])
        annealed = any(view.annealed for _, view, _ in evidence.views)  # losses of iterations do not compare
        return MatchingProblem(
            settings=SearchSettings(
                iterations=self.iterations,
                patience=self.patience,
                stop_below=self.stop_below,
                check_every=self.check_every,
                report_every=self.progress_every,
                backend=self.backend,
                onednn=self.onednn,
                together=together,
            ),
            rngs=[rng.child("restart", number) for number in restarts],
            precision=PRECISIONS[self.precision],
            constants=constants_of(evidence, form, self.objective),
            consensus=self.consensus,
            keeps_best=self.keep == "best" and not annealed,
            evidence=evidence,
            form=form,
            objective=self.objective,
            priors=self.priors,
            labels=self.labels,
        )

    def answer(self, evidence: Evidence, found: Found) -> Reconstruction:
        """What was found, as an attack's answer."""
        result = found.result
        notes = {
            "losses": [candidate.loss for candidate in result.candidates],
            "assumed": sorted({note for _, view, _ in evidence.views for note in view.notes}),
            **self.optimizer.effort(result.candidates),
            "backend": result.backend,
            "onednn": result.onednn,
        }
        best, first_loss = result.best, self.optimizer.first_loss(result.candidates)
        return Reconstruction(found.guess, best.loss, notes, first_loss=first_loss, history=best.history)


@dataclass(frozen=True)
class Job:
    """Some restarts of a search, for one process."""

    attack: Matching
    evidence: Evidence
    rng: Rng
    restarts: Sequence[int]
    together: bool
    watched: bool


def _run(job: Job, tell: Tell[Message]) -> Found:
    problem = job.attack.problem(job.evidence, job.rng, job.restarts, together=job.together)

    def on_step(iteration: int, loss: float, variables: Tree) -> None:
        tell((iteration, loss, problem.images(variables)))

    with global_seed(job.rng.child("network")):
        result = job.attack.optimizer.minimize(problem, on_step if job.watched else None)
    return Found(result, problem.guess(result.best.variables))


def _joined(parts: Sequence[Found]) -> Found:
    """What several jobs found, as one search."""
    best = min(parts, key=lambda part: part.result.best.rank())
    candidates = [candidate for part in parts for candidate in part.result.candidates]
    return Found(replace(parts[0].result, candidates=candidates), best.guess)


def _best_of_all(progress: Progress | None, jobs: int) -> Callable[[int, Message], None]:
    """Passes reports on; where restarts are apart, always with the best guess of all so far."""
    best: list[tuple[float, Tensor | None]] = []

    def told(job: int, message: Message) -> None:
        iteration, loss, guess = message
        if jobs > 1:
            loss, guess = min([*best, (loss, guess)], key=lambda known: known[0])
            best[:] = [(loss, guess)]
        if progress is not None:
            progress(iteration, loss, guess)

    return told
