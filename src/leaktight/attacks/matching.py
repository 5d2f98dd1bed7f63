"""THE matching loop: search for examples whose update is the one that was seen.

An attack is a composition: what is matched, an objective, priors, a label strategy, where to start, an optimiser,
restarts. Every published attack is a preset of these (`attacks/presets.py`). The answer is chosen by the attack's own
loss. A whole iteration is one pure function of tensors, traced once; restarts run side by side under vmap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils import _pytree as pytree

from leaktight.attacks.backends import Backend, make_runnable
from leaktight.attacks.descent import Adam
from leaktight.attacks.initial import Noise, Start
from leaktight.attacks.labels import Idlg, Joint
from leaktight.attacks.last_layer import LabelStrategy
from leaktight.attacks.lbfgs import Lbfgs
from leaktight.attacks.matched import Matched, Simulation, View, taken
from leaktight.attacks.objectives import Cosine, Objective
from leaktight.attacks.priors import BatchNormStatistics, GroupConsistency, ImagePrior
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng, global_seed
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Batch, ImageShape, Observation, Reconstruction

Prior: TypeAlias = ImagePrior | BatchNormStatistics
Tree: TypeAlias = dict[str, Any]
"""Tensors by name, nested."""

_PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
_CONSENSUS_FROM, _CONSENSUS_EVERY = 500, 100


@dataclass(frozen=True)
class Problem:
    """What is to be found, and the views of it. Each view has a weight and the places of its examples among all."""

    views: Sequence[tuple[float, View, tuple[int, ...]]]
    labels: Tensor | None
    num_examples: int
    shape: ImageShape
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Search for images that explain an update, by a composition of parts.

    objective: the distance between updates (None: priors alone, a negative control that ignores the update).
    priors: pairs of weight and prior. labels: how labels are inferred, or `Joint` to search for them too.
    restarts: independent starts; the one with the lowest loss is the answer. box: keep pixels in [0, 1].
    consensus: the weight that draws restarts to their common mean (GradInversion).
    keep: answer with the "best" iterate by the attack's own loss, or the "last".
    patience: stop when the loss has not fallen by 1 % in so many iterations (None: never).
    stop_below: stop at such a loss. progress_every: how often `progress` is called.
    onednn: None lets a few timed iterations decide; fix it to get the same bits on every machine of a kind.
    Assumes: the number of examples (BATCH_SIZE), and what its parts assume.
    """

    objective: Objective | None = Cosine()
    matched: Matched = Simulation()
    priors: tuple[tuple[float, Prior], ...] = ()
    labels: LabelStrategy | Joint = Idlg()
    start: Start = Noise()
    optimizer: Adam | Lbfgs = Adam(slope="sign", decay="steps")
    iterations: int = 4800
    restarts: int = 1
    box: bool = True
    consensus: float = 0.0
    keep: Literal["best", "last"] = "best"
    backend: Backend = "fx"
    precision: Literal["float32", "float64"] = "float32"
    onednn: bool | None = None
    patience: int | None = None
    stop_below: float | None = None
    progress_every: int = 100

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts", "progress_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.consensus and self.restarts < 2:
            raise ValueError("consensus draws restarts together; set restarts to 2 or more")

    @property
    def requires(self) -> frozenset[Knowledge]:
        return self.labels.requires | {Knowledge.BATCH_SIZE}

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        """Find the examples behind one update, or behind several updates of the same examples."""
        if not seen:
            raise UsageError("expected at least one observation, got none")
        for each in seen:
            require(each, Knowledge.BATCH_SIZE)
        number = seen[0].batch_size or 0
        if any(each.batch_size != number for each in seen):
            raise UsageError("these observations are of different numbers of examples; attack them one at a time")
        labels = None
        if isinstance(self.labels, LabelStrategy):
            labels = self.labels.infer(seen[0], number, rng=rng.child("labels"))
        views = [(1.0, self.view(each), tuple(range(number))) for each in seen]
        problem = Problem(views, labels, number, seen[0].input_shape, seen[0].num_classes)
        return self.solve(problem, rng=rng, progress=progress)

    def view(self, seen: Observation) -> View:
        """An observation as this attack matches it."""
        scale_free = self.objective is None or self.objective.scale_free
        return self.matched.view(seen, seen.batch_size or 0, _PRECISIONS[self.precision], needs_scale=not scale_free)

    def solve(self, problem: Problem, *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        """Run the search itself."""
        run = _Run(self, problem, progress)
        starts = [self._start(problem, rng.child("restart", number)) for number in range(self.restarts)]
        with global_seed(rng.child("network")):
            found, losses, notes = run.descend(starts, rng) if isinstance(self.optimizer, Adam) else run.bend(starts)
        winner = min(range(len(losses)), key=lambda place: losses[place] if math.isfinite(losses[place]) else math.inf)
        images = found[winner]["images"].detach().to(torch.float32)
        labels = problem.labels if problem.labels is not None else found[winner]["labels"].argmax(1)
        assumed = sorted({note for _, view, _ in problem.views for note in view.notes})
        return Reconstruction(Batch(images, labels), losses[winner], {"losses": losses, "assumed": assumed, **notes})

    def _start(self, problem: Problem, rng: Rng) -> dict[str, Tensor]:
        precision = _PRECISIONS[self.precision]
        shape = (problem.num_examples, *problem.shape)
        variables = {"images": self.start.draw(shape, rng.child("images").torch()).to(precision)}
        if isinstance(self.labels, Joint):
            draw = self.labels.draw(problem.num_examples, problem.num_classes, rng.child("labels").torch())
            variables["labels"] = draw.to(precision)
        return variables


class _Run:
    """One search: the loss as a pure function, and the two ways to minimise it."""

    def __init__(self, attack: Matching, problem: Problem, progress: Progress | None) -> None:
        self.attack, self.problem, self.progress = attack, problem, progress
        self.fixed: Tree = {
            "views": [
                {
                    "params": dict(view.params),
                    "buffers": dict(view.buffers),
                    "prepared": {}
                    if attack.objective is None
                    else attack.objective.prepare(view.target, view.trainer.model, problem.shape),
                }
                for _, view, _ in problem.views
            ],
        }
        if problem.labels is not None:
            self.fixed["labels"] = problem.labels

    def loss(self, variables: Tree, fixed: Tree) -> Tensor:
        images = variables["images"]
        labels = fixed["labels"] if "labels" in fixed else variables["labels"].softmax(1)
        terms = [weight * self._penalty(prior, images, fixed) for weight, prior in self.attack.priors]
        if self.attack.objective is not None:
            for (weight, view, places), tensors in zip(self.problem.views, fixed["views"], strict=True):
                examples = taken(images, places), taken(labels, places)
                guess = view.guess(*examples, tensors["params"], tensors["buffers"])
                terms.append(weight * self.attack.objective.loss(guess, tensors["prepared"]))
        if "consensus" in fixed:
            terms.append(fixed["pull"] * GroupConsistency().penalty(images, fixed["consensus"]))
        return torch.stack(terms).sum() if terms else images.sum() * 0

    def _penalty(self, prior: Prior, images: Tensor, fixed: Tree) -> Tensor:
        if isinstance(prior, ImagePrior):
            return prior.penalty(images)
        _, view, _ = self.problem.views[0]
        tensors = fixed["views"][0]
        return prior.penalty(images, view.trainer.model, tensors["params"], tensors["buffers"])

    def descend(self, starts: list[Tree], rng: Rng) -> tuple[list[Tree], list[float], Tree]:
        """First-order steps, all restarts side by side."""
        attack, optimizer = self.attack, self.attack.optimizer
        assert isinstance(optimizer, Adam)
        many = len(starts) > 1  # a batch of one would turn convolutions into slower, grouped ones
        variables = {name: torch.stack([start[name] for start in starts]) for name in starts[0]} if many else starts[0]
        dtype = variables["images"].dtype
        state: Tree = {
            "variables": variables,
            "memory": optimizer.memory(variables),
            "best": {name: tensor.clone() for name, tensor in variables.items()},
            "loss": torch.full((len(starts),) if many else (), math.inf, dtype=dtype),
        }
        if optimizer.langevin:
            state["noise"] = torch.zeros_like(variables["images"])
        fixed = dict(self.fixed)
        if attack.consensus:
            fixed |= {"consensus": variables["images"].mean(0), "pull": torch.zeros((), dtype=dtype)}
        rates = torch.tensor(optimizer.rates(0, attack.iterations), dtype=dtype)
        leaves, spec = pytree.tree_flatten((state, rates, fixed))
        step = vmap(self._step, in_dims=(0, None, None), randomness="different") if many else self._step

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(pytree.tree_leaves(step(*pytree.tree_unflatten(tensors, spec))))

        runnable = make_runnable(flat, leaves, attack.backend, attack.onednn)
        schedule = torch.tensor([optimizer.rates(i, attack.iterations) for i in range(attack.iterations)], dtype=dtype)
        _, shape_of_state = pytree.tree_flatten(state)
        others = pytree.tree_leaves(fixed)
        noise = rng.child("langevin").torch()
        watch = _Plateau(attack)
        iteration = 0
        for iteration in range(attack.iterations):
            state = pytree.tree_unflatten(
                runnable(*pytree.tree_leaves(state), schedule[iteration], *others), shape_of_state
            )
            if optimizer.langevin:
                state["noise"] = torch.randn(state["noise"].shape, generator=noise, dtype=dtype)
            if attack.consensus and iteration >= _CONSENSUS_FROM and iteration % _CONSENSUS_EVERY == 0:
                fixed |= {
                    "consensus": state["best"]["images"].mean(0),
                    "pull": torch.tensor(attack.consensus, dtype=dtype),
                }
                others = pytree.tree_leaves(fixed)
            if (iteration + 1) % attack.progress_every == 0 and self._report(iteration + 1, state, watch):
                break
        best = state["best" if attack.keep == "best" else "variables"]
        found = (
            [{name: tensor[place] for name, tensor in best.items()} for place in range(len(starts))] if many else [best]
        )
        notes = {"iterations": iteration + 1, "backend": runnable.backend, "onednn": runnable.onednn}
        return found, state["loss"].reshape(-1).tolist(), notes

    def _step(self, state: Tree, rates: Tensor, fixed: Tree) -> Tree:
        """One iteration of one restart: a pure function of tensors."""
        optimizer = self.attack.optimizer
        assert isinstance(optimizer, Adam)
        variables = state["variables"]
        gradient, loss = grad_and_value(self.loss)(variables, fixed)
        better = loss < state["loss"]
        following, memory = optimizer.step(variables, gradient, state["memory"], rates)
        if optimizer.langevin:
            following["images"] = following["images"] + optimizer.langevin * rates[0] * state["noise"]
        if self.attack.box:
            following["images"] = following["images"].clamp(0, 1)
        best = state["best"]
        return {
            **state,
            "variables": following,
            "memory": memory,
            "best": {name: torch.where(better, variables[name], best[name]) for name in variables},
            "loss": torch.where(better, loss, state["loss"]) if self.attack.keep == "best" else loss,
        }

    def _report(self, iteration: int, state: Tree, watch: _Plateau) -> bool:
        losses = state["loss"].reshape(-1)
        place = int(losses.argmin())
        if self.progress is not None:
            images = state["best"]["images"]
            self.progress(iteration, float(losses[place]), images[place] if len(losses) > 1 else images)
        return watch(iteration, float(losses[place]))

    def bend(self, starts: list[Tree]) -> tuple[list[Tree], list[float], Tree]:
        """L-BFGS, one restart after the other."""
        attack, optimizer = self.attack, self.attack.optimizer
        assert isinstance(optimizer, Lbfgs)
        _, spec = pytree.tree_flatten(starts[0])
        shapes = [tensor.shape for tensor in pytree.tree_leaves(starts[0])]
        leaves, layout = pytree.tree_flatten(self.fixed)

        def unflatten(point: Tensor) -> Tree:
            parts = torch.split(point, [shape.numel() for shape in shapes])
            tree: Tree = pytree.tree_unflatten([part.reshape(s) for part, s in zip(parts, shapes, strict=True)], spec)
            return tree

        def flat(point: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            fixed = pytree.tree_unflatten(tensors, layout)
            gradient, value = grad_and_value(lambda here: self.loss(unflatten(here), fixed))(point)
            return value, gradient

        points = [torch.cat([tensor.reshape(-1) for tensor in pytree.tree_leaves(start)]) for start in starts]
        runnable = make_runnable(flat, [points[0], *leaves], attack.backend, attack.onednn)
        found, losses, evaluations = [], [], 0
        for point in points:
            result = optimizer.search(
                self._function(runnable, leaves),
                point,
                attack.iterations,
                self._watch(unflatten),
                box=attack.box and optimizer.line_search == "wolfe",
            )
            found.append(unflatten(result.point))
            losses.append(result.loss)
            evaluations += result.evaluations
            if attack.stop_below is not None and result.loss < attack.stop_below:
                break
        return found, losses, {"evaluations": evaluations, "backend": runnable.backend, "onednn": runnable.onednn}

    def _function(
        self, runnable: Callable[..., tuple[Tensor, ...]], leaves: list[Tensor]
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def evaluate(point: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = runnable(point, *leaves)
            return value, gradient

        return evaluate

    def _watch(self, unflatten: Callable[[Tensor], Tree]) -> Callable[[int, float, Tensor], bool]:
        plateau = _Plateau(self.attack)

        def watch(evaluations: int, loss: float, point: Tensor) -> bool:
            if evaluations % self.attack.progress_every:
                return False
            if self.progress is not None:
                self.progress(evaluations, loss, unflatten(point)["images"])
            return plateau(evaluations, loss)

        return watch


class _Plateau:
    """Says when to stop: the loss is low enough, or has stopped falling."""

    def __init__(self, attack: Matching) -> None:
        self.attack = attack
        self.reference, self.since = math.inf, 0

    def __call__(self, iteration: int, loss: float) -> bool:
        if self.attack.stop_below is not None and loss < self.attack.stop_below:
            return True
        if loss < 0.99 * self.reference:
            self.reference, self.since = loss, iteration
        return self.attack.patience is not None and iteration - self.since >= self.attack.patience
