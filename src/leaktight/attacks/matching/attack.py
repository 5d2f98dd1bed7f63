"""The matching loop: search for examples whose update is the observed one.

An attack is a composition of a search space, a way to match, an objective, priors, a label strategy, an optimiser and
restarts. Published attacks are presets of these (`attacks/presets`). A whole iteration is one pure function of tensors
(`problem.py`), traced once.

From a preset's `reconstruct` to the first iteration: `Matching.reconstruct` reads the update (`evidence`), `search`
spreads the restarts (`spread.py`), `run_all` runs them here or in processes, `_run` makes the `MatchingProblem`, and
the optimiser's `minimize` iterates. `Lbfgs` and the optimisers without derivatives have one more function for a restart
(`lbfgs.wolfe` or `plain`, `DerivativeFree._restart`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import Idlg, Joint
from leaktight.attacks.matching.first_look import FirstLook
from leaktight.attacks.matching.objectives import Cosine, Objective
from leaktight.attacks.matching.orders import STARTS, candidates, in_order
from leaktight.attacks.matching.problem import PRECISIONS, MatchingProblem, Prior, constants_of
from leaktight.attacks.matching.slopes import Slopes, with_slopes
from leaktight.attacks.matching.sought import Pixels, Sought
from leaktight.attacks.matching.spread import Parallel, Workload, choose, choose_backend, groups_of
from leaktight.attacks.matching.view import Evidence, Matched, Simulation, View
from leaktight.attacks.optimizers.compile import Backend, BackendSetting
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.optimizer import Candidate, Optimizer, SearchResult, SearchSettings, Tree
from leaktight.core.devices import device_of, moved
from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.protocols import Attack, LabelSource, Progress, require_seen
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import squared_norm
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.runtime.executor import Tell
from leaktight.runtime.processes import available_cores, in_worker, run_all

Message: TypeAlias = tuple[int, float, Tensor | None]
"""What a search reports while it runs: the iteration, the loss, the best images so far."""


@dataclass(frozen=True)
class MatchingResult:
    """search: the results of all restarts. guess: the examples found by the best of them. distance: its loss without
    priors. first_loss: of a search that this one has continued, or of one whose losses do not compare; else None."""

    search: SearchResult
    guess: Batch
    distance: float
    first_loss: float | None = None

    def followed(self, later: MatchingResult, optimizer: Optimizer) -> MatchingResult:
        """The result of a search that a later one with a single restart has continued, with the history of both."""
        before, best = self.effort(optimizer), later.search.best
        history = (*self.search.best.history, *((before + step, loss) for step, loss in best.history))
        whole = replace(best, steps=before + best.steps, history=history)
        return replace(later, search=replace(later.search, candidates=[whole]), first_loss=self.begun(optimizer))

    def begun(self, optimizer: Optimizer) -> float | None:
        """The loss that the whole search began with."""
        return optimizer.first_loss(self.search.candidates) if self.first_loss is None else self.first_loss

    def effort(self, optimizer: Optimizer) -> int:
        """Iterations of all restarts, or evaluations, as the optimiser counts them."""
        return sum(optimizer.effort(self.search.candidates).values())


@dataclass(frozen=True, kw_only=True)
class Matching(Attack):
    """Search for images that explain an update, by a composition of parts.

    objective: the distance between updates; None for priors alone, a negative control that ignores the update.
    matched: how the update of a guess is computed. priors: pairs of a weight and a prior.
    labels: how labels are inferred, or `Joint` to search for them too.
    sought: what the search moves in place of the examples: pixels, or a generator's latents or weights.
    iterations: of each restart. restarts: independent starts; the one with the lowest loss is the answer.
    consensus: weight of the term that pulls restarts towards their mean (GradInversion); needs 2 restarts.
    slopes: the derivatives of the loss by the logits are those of the guess ("guessed"), or those that the gradient of
    the last layer shows where it shows them ("observed"; `slopes.py`).
    keep: return the "best" iterate by the attack's own loss, or the "last".
    backend: how an iteration is run, "eager", "fx" (traced) or "inductor" (compiled); "auto" compiles where the victims
    of an audit together save more time than compiling takes.
    parallel: restarts as one traced function ("vmap"), in "processes", or one after another ("none"); "auto" takes vmap
    for small networks and processes for long searches on large ones.
    onednn: whether convolutions use oneDNN; None: a few timed iterations decide, so results may differ in the last bits
    between machines.
    patience: stop when the loss has not fallen by 1 % in this many iterations (L-BFGS: evaluations); None: never, nor
    while the network of guesses changes (soft layers).
    stop_below: stop when the loss is below this; L-BFGS begins no further restart then, nor with patience if the loss
    still fell at the last iteration. check_every: iterations (L-BFGS: evaluations) between two such checks.
    progress_every: iterations between two calls of `progress`; it changes no result.
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
    slopes: Slopes = "guessed"
    keep: Literal["best", "last"] = "best"
    backend: BackendSetting = "auto"
    precision: Literal["float32", "float64"] = "float32"
    parallel: Parallel = "auto"
    onednn: bool | None = None
    patience: int | None = None
    stop_below: float | None = None
    check_every: int = 100
    progress_every: int = 100

    def __post_init__(self) -> None:
        require_at_least(1, iterations=self.iterations, restarts=self.restarts)
        require_at_least(1, check_every=self.check_every, progress_every=self.progress_every)
        if self.consensus and self.restarts < 2:
            raise ValueError(f"expected restarts >= 2 with consensus, got {self.restarts}")
        if self.parallel == "vmap" and not self.optimizer.abreast:
            kind = type(self.optimizer).__name__
            raise ValueError(f'expected parallel "auto", "processes" or "none" with {kind}, got "vmap"')

    @property
    def requires(self) -> frozenset[Knowledge]:
        return self.labels.requires | {Knowledge.BATCH_SIZE}

    @property
    def labels_from(self) -> LabelSource:
        return self.labels.source

    @property
    def joins_rounds(self) -> bool:
        return self.objective is not None

    def pinned(self, *, onednn: bool) -> Self:
        return replace(self, onednn=onednn if self.onednn is None else self.onednn, progress_every=1)

    @property
    def rough_iterations(self) -> int:
        """Of each restart of the search to begin with; what follows is one search."""
        return 0 if self.sought.rough is None else self.sought.rough[0]

    @property
    def workload(self) -> Workload:
        """The work of a search. Restarts are separable if none needs the results of another."""
        optimizer = self.optimizer
        steps = self.rough_iterations + self.iterations // self.restarts if self.rough_iterations else self.iterations
        return Workload(
            restarts=self.restarts,
            steps=steps * optimizer.steps_per_iteration,
            abreast=optimizer.abreast and self.sought.abreast,
            separable=not self.consensus and (self.stop_below is None or optimizer.abreast),
        )

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        """Reconstruct the examples of one update, or of several updates of the same examples."""
        evidence = self.settled(self.evidence(seen, rng=rng), rng=rng)
        return self.answer(evidence, self.search(evidence, rng=rng, progress=progress))

    def evidence(self, seen: Sequence[Observation], *, rng: Rng) -> Evidence:
        """The observations as this attack matches them, with their labels unless those are searched for.

        With a scale-free objective each of several updates counts by its squared length, as it does in a squared
        distance. So a round in which the examples were already learned, and noise is all that is left, counts little.
        """
        first = require_seen(self, seen)
        for each in seen:
            require(each, Knowledge.BATCH_SIZE)
        number = first.batch_size or 0
        if any(each.batch_size != number for each in seen):
            raise UsageError("expected observations of equally many examples, got others; attack them one at a time")
        labels = None
        if isinstance(self.labels, LabelStrategy):
            labels = moved(self.labels.infer(first, number, rng=rng.child("labels")), device_of(first.update.tensors))
        shown = [self._sloped(self.view(each), labels, several=len(seen) > 1) for each in seen]
        weights = self._weights(shown)
        views = [(weight, view, tuple(range(number))) for weight, view in zip(weights, shown, strict=True)]
        ordered = isinstance(self.labels, LabelStrategy) and self.labels.ordered
        return Evidence(views, labels, number, first.inputs.shape, first.num_classes, ordered)

    def settled(self, evidence: Evidence, *, rng: Rng) -> Evidence:
        """The evidence in the most likely order of the examples over the client's steps.

        The order is chosen by the loss: of many orders at the images of a start, then of the best few after a short
        search each.
        """
        most = max(view.orders for _, view, _ in evidence.views)
        if most == 1 or self.objective is None or not any(view.steps for _, view, _ in evidence.views):
            return evidence
        score = FirstLook(self.problem(evidence, rng, range(STARTS), together=False))
        with global_seed(rng.child("network")):
            orders = candidates(evidence, most, score, ordered=evidence.ordered, rng=rng.child("orders"))
        likely = [in_order(evidence, order) for order in orders[:SHORT_SEARCHES]]
        if len(likely) == 1:
            return likely[0]
        short = self._short(evidence, self._backend(evidence, same_graph=len(orders[0]) == 1))
        load = replace(short.workload, restarts=len(likely), abreast=False)
        way, workers = choose(load, evidence, self.parallel, 1 if in_worker() else available_cores())
        jobs = [_Job(short, each, rng, [0], False, False) for each in likely]
        found = run_all(_run, jobs, workers=workers if way == "processes" else 1)
        ranks = [each.search.best.rank() for each in found]
        return likely[ranks.index(min(ranks))]

    def _short(self, evidence: Evidence, backend: Backend) -> Self:
        """The search that tells orders apart: a short one, and only the rough one where a search begins with that."""
        iterations, sought = self.iterations, self.sought
        if sought.rough is not None and evidence.seeks_images_alone:
            iterations, sought = iterations + sought.rough[0], sought.rough[1]
        iterations = max(1, iterations // SHORTER)
        return replace(self, sought=sought, iterations=iterations, restarts=1, consensus=0.0, backend=backend)

    def _sloped(self, view: View, labels: Tensor | None, *, several: bool) -> View:
        """The view with the slopes of the loss, if they are to be observed; their order must be that of the labels."""
        ordered = labels is not None and (not several or len(labels.unique()) == len(labels))
        if self.slopes == "guessed" or self.objective is None or not ordered:
            return view
        return with_slopes(view, labels, scaled=self.objective.scale_free)

    def _weights(self, views: Sequence[View]) -> list[float]:
        """The weights of several updates, 1 on average."""
        if len(views) == 1 or self.objective is None or not self.objective.scale_free:
            return [1.0] * len(views)
        squares = [float(squared_norm(view.target.values())) for view in views]
        mean = sum(squares) / len(squares)
        return [square / mean for square in squares] if mean else [1.0] * len(views)

    def view(self, seen: Observation) -> View:
        """One observation as this attack matches it."""
        scale_free = self.objective is None or self.objective.scale_free
        return self.matched.view(seen, seen.batch_size or 0, PRECISIONS[self.precision], needs_scale=not scale_free)

    def search(self, evidence: Evidence, *, rng: Rng, progress: Progress | None = None) -> MatchingResult:
        """Run all restarts, here or in processes; with a rough search first, these are restarts of that one."""
        rough = self.sought.rough
        if rough is not None and evidence.seeks_images_alone:  # all else that it found would be lost
            iterations, sought = rough
            both = replace(self, backend=self._backend(evidence))
            found = replace(both, sought=sought, iterations=iterations).search(evidence, rng=rng, progress=progress)
            fine = replace(both, sought=self.sought.again(found.guess.inputs), restarts=1, consensus=0.0)
            later = _later(progress, found.effort(self.optimizer))
            return found.followed(fine.search(evidence, rng=rng, progress=later), self.optimizer)
        load = self.workload
        way, workers = choose(load, evidence, self.parallel, 1 if in_worker() else available_cores())
        groups = groups_of(load, evidence, way)
        attack = replace(self, backend=self._backend(evidence))  # here: not known in processes
        jobs = [_Job(attack, evidence, rng, group, way == "vmap", progress is not None) for group in groups]
        return _joined(run_all(_run, jobs, workers=workers, on_message=_best_of_all(progress, len(jobs))))

    def _backend(self, evidence: Evidence, *, same_graph: bool = True) -> Backend:
        """How iterations of this search are run. same_graph: whether short searches before it have its graphs."""
        backend = choose_backend(self.workload, evidence, self.backend, graphs=2 if self.rough_iterations else 1)
        return backend if same_graph or backend == "eager" else "fx"

    def problem(self, evidence: Evidence, rng: Rng, restarts: Sequence[int], *, together: bool) -> MatchingProblem:
        """What the optimiser minimises. restarts: their indices. together: as one traced function under vmap."""
        precision = PRECISIONS[self.precision]
        space = self.sought.space(evidence, rng.child("sought"), precision)
        weights = [weight for weight, _ in self.priors]
        return MatchingProblem(
            settings=SearchSettings(
                iterations=self.iterations,
                patience=None if evidence.annealed else self.patience,
                stop_below=self.stop_below,
                check_every=self.check_every,
                report_every=self.progress_every,
                backend=self._backend(evidence),
                onednn=self.onednn,
                together=together,
            ),
            rngs=[rng.child("restart", number) for number in restarts],
            precision=precision,
            device=evidence.device,
            constants=moved(constants_of(evidence, space, self.objective, weights, precision), evidence.device),
            consensus=self.consensus,
            keeps_best=self.keep == "best" and not evidence.annealed,
            evidence=evidence,
            space=space,
            objective=self.objective,
            priors=self.priors,
            labels=self.labels,
        )

    def answer(self, evidence: Evidence, found: MatchingResult) -> Reconstruction:
        """The result of a search as a `Reconstruction`."""
        result = found.search
        notes = {
            "distance": found.distance,
            "losses": [candidate.loss for candidate in result.candidates],
            "assumed": sorted({note for _, view, _ in evidence.views for note in view.notes}),
            **self.optimizer.effort(result.candidates),
            "backend": result.backend,
            "onednn": result.onednn,
        }
        best = result.best
        first_loss = found.begun(self.optimizer)
        return Reconstruction(found.guess, best.loss, notes, first_loss=first_loss, history=best.history)


SHORT_SEARCHES = 8  # orders that get a short search
SHORTER = 30  # how many times shorter it is


@dataclass(frozen=True)
class _Job:
    """Some restarts of a search, run in one process. restarts: their indices. watched: whether to report progress."""

    attack: Matching
    evidence: Evidence
    rng: Rng
    restarts: Sequence[int]
    together: bool
    watched: bool


def _run(job: _Job, tell: Tell[Message]) -> MatchingResult:
    problem = job.attack.problem(job.evidence, job.rng, job.restarts, together=job.together)

    def on_step(iteration: int, loss: float, variables: Tree) -> None:
        tell((iteration, loss, problem.images(variables)))

    with global_seed(job.rng.child("network")):
        result = job.attack.optimizer.minimize(problem, on_step if job.watched else None)
        result, first_loss = _comparable(problem, result) if job.evidence.annealed else (result, None)
        best = result.best.variables
        return MatchingResult(result, problem.guess(best), problem.distance(best), first_loss)


def _comparable(problem: MatchingProblem, result: SearchResult) -> tuple[SearchResult, float]:
    """The result of an annealed search with its losses, and the lowest that it began with, as they are at the end."""
    lone = replace(problem, consensus=0.0)

    def loss(variables: Tree) -> float:
        with torch.no_grad():
            return float(lone.loss(variables, {}, lone.constants))

    candidates = [replace(each, loss=loss(each.variables)) for each in result.candidates]
    first = [Candidate(variables, loss(variables), 0) for variables in map(problem.start, problem.rngs)]
    return replace(result, candidates=candidates), min(map(Candidate.rank, first))


def _joined(parts: Sequence[MatchingResult]) -> MatchingResult:
    """The results of several jobs as one."""
    best = min(parts, key=lambda part: part.search.best.rank())
    candidates = [candidate for part in parts for candidate in part.search.candidates]
    first_loss = min((part.first_loss for part in parts if part.first_loss is not None), default=None)
    return replace(best, search=replace(parts[0].search, candidates=candidates), first_loss=first_loss)


def _later(progress: Progress | None, steps: int) -> Progress | None:
    """A listener for a search that begins after so many steps of another one."""
    if progress is None:
        return None
    return lambda step, loss, guess: progress(steps + step, loss, guess)


def _best_of_all(progress: Progress | None, jobs: int) -> Callable[[int, Message], None]:
    """A listener that passes reports to `progress`; with several jobs, always the best guess of all so far."""
    best: list[tuple[float, Tensor | None]] = []

    def on_message(job: int, message: Message) -> None:
        iteration, loss, guess = message
        if jobs > 1:
            loss, guess = min([*best, (loss, guess)], key=lambda known: known[0])
            best[:] = [(loss, guess)]
        if progress is not None:
            progress(iteration, loss, guess)

    return on_message
