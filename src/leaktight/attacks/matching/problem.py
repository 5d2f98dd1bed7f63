"""What is searched for, and the loss as a pure function of tensors.

`first_order.py` and `second_order.py` minimise it. One search serves several victims at once if they are alike, that is
if they differ in tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from leaktight.attacks.labels.rules import Joint
from leaktight.attacks.matching.priors import BatchNormStatistics, GroupConsistency, ImagePrior
from leaktight.attacks.matching.view import View, taken
from leaktight.attacks.optimizers.lanes import Tree
from leaktight.core.rng import Rng
from leaktight.models.surgery import mode_of

if TYPE_CHECKING:
    from leaktight.attacks.matching.attack import Matching

Prior: TypeAlias = ImagePrior | BatchNormStatistics
VictimProgress: TypeAlias = Callable[[int, int, float, Tensor | None], None]
"""Called with the place of the victim, the iteration, the loss and the best guess so far."""

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Problem:
    """What is to be found, and the views of it. Each view has a weight and the places of its examples among all."""

    views: Sequence[tuple[float, View, tuple[int, ...]]]
    labels: Tensor | None
    num_examples: int
    shape: tuple[int, ...]
    num_classes: int


@dataclass(frozen=True)
class Candidate:
    """What one restart found.

    variables: what was searched for. images, labels: the examples that it stands for.
    iterations: how many it took, or evaluations of the loss for L-BFGS.
    """

    variables: Tree
    images: Tensor
    labels: Tensor
    loss: float
    iterations: int

    def rank(self) -> float:
        """The lower the better."""
        return self.loss if math.isfinite(self.loss) else math.inf


@dataclass(frozen=True)
class Found:
    """What the restarts of one victim found, in their order, and how it was computed."""

    candidates: Sequence[Candidate]
    backend: str
    onednn: bool

    @property
    def best(self) -> Candidate:
        return min(self.candidates, key=Candidate.rank)


class Search:
    """The search for one victim, or for several that are alike.

    restarts: the numbers of the restarts to make. Each has random streams of its own, so that a restart comes out the
    same in whatever company it is run.
    """

    def __init__(
        self,
        attack: Matching,
        problems: Sequence[Problem],
        rngs: Sequence[Rng],
        restarts: Sequence[int],
        progress: VictimProgress | None = None,
    ) -> None:
        self.attack, self.problem, self.progress = attack, problems[0], progress
        self.precision = PRECISIONS[attack.precision]
        self.rngs = [[rng.child("restart", number) for number in restarts] for rng in rngs]
        self.forms = [
            attack.sought.form(problem, rng.child("sought"), self.precision)
            for problem, rng in zip(problems, rngs, strict=True)
        ]
        self.form = self.forms[0]
        self.fixed = [
            self._constants(problem, form.constants) for problem, form in zip(problems, self.forms, strict=True)
        ]

    def _constants(self, problem: Problem, constants: Tree) -> Tree:
        objective = self.attack.objective
        fixed: Tree = {
            "sought": constants,
            "views": [
                {
                    "params": dict(view.params),
                    "buffers": dict(view.buffers),
                    "weights": dict(view.weights),
                    "prepared": {}
                    if objective is None
                    else objective.prepare(view.weighted(view.target, view.weights), view.trainer.model, problem.shape),
                }
                for _, view, _ in problem.views
            ],
        }
        return fixed if problem.labels is None else {**fixed, "labels": problem.labels}

    @property
    def keeps_best(self) -> bool:
        """Whether the best iterate is the answer; where something is annealed, losses of iterations do not compare."""
        return self.attack.keep == "best" and not any(view.annealed for _, view, _ in self.problem.views)

    def start(self, rng: Rng) -> Tree:
        """Where a restart begins."""
        variables = dict(self.form.draw(rng))
        if isinstance(self.attack.labels, Joint):
            variables |= self.form.draw_labels(self.attack.labels, rng.child("labels"))
        for place, (_, view, _) in enumerate(self.problem.views):
            for name, unknown in view.unknowns.items():
                variables[_unknown(place, name)] = unknown.draw(rng.child("unknown", place, name)).to(self.precision)
        return variables

    def candidate(self, victim: int, variables: Tree, loss: float, iterations: int) -> Candidate:
        """What a restart has found, as examples."""
        form, fixed = self.forms[victim], self.fixed[victim]
        with torch.no_grad():
            images = form.images(variables, fixed["sought"])
            labels = fixed["labels"] if "labels" in fixed else form.label_logits(variables, fixed["sought"]).argmax(1)
        return Candidate(variables, images, labels, loss, iterations)

    def loss(self, variables: Tree, group: Tree, fixed: Tree, share: Tensor | None = None) -> Tensor:
        """The loss of one guess. group: what draws restarts together, or empty. fixed: the victim's constants.

        share: of the search that is done; None: all of it.
        """
        form, constants = self.form, fixed["sought"]
        images = form.images(variables, constants)
        labels = fixed["labels"] if "labels" in fixed else form.label_logits(variables, constants).softmax(1)
        terms = [weight * self._penalty(prior, images, fixed) for weight, prior in self.attack.priors]
        own = form.penalty(variables, constants)
        if own is not None:
            terms.append(own)
        if self.attack.objective is not None:
            for number, (weight, view, places) in enumerate(self.problem.views):
                tensors = fixed["views"][number]
                examples = taken(images, places), taken(labels, places)
                unknowns = {name: variables[_unknown(number, name)] for name in view.unknowns}
                buffers = view.buffers_at(share, tensors["buffers"])
                guess = view.guess(*examples, tensors["params"], buffers, unknowns)
                guess = view.weighted(guess, tensors["weights"])
                terms.append(weight * self.attack.objective.loss(guess, tensors["prepared"]))
        if group:
            terms.append(group["pull"] * GroupConsistency().penalty(images, group["consensus"]))
        return torch.stack(terms).sum() if terms else images.sum() * 0

    def _penalty(self, prior: Prior, images: Tensor, fixed: Tree) -> Tensor:
        if isinstance(prior, ImagePrior):
            return prior.penalty(images)
        _, view, _ = self.problem.views[0]
        tensors = fixed["views"][0]
        with mode_of(view.trainer.model, view.trainer.mode):
            return prior.penalty(images, view.trainer.model, tensors["params"], tensors["buffers"])


def _unknown(view: int, name: str) -> str:
    """The name of a view's unknown among the variables of a search."""
    return f"{view}:{name}"


def channels_last(tree: Tree) -> Tree:
    """The tree with the weights of convolutions in the layout in which a step took 3 to 15 % less time.

    Not for use under vmap: PyTorch 2.13 then gives wrong gradients of weights, without an error.
    """
    laid_out: Tree = pytree.tree_map(
        lambda each: each.contiguous(memory_format=torch.channels_last) if each.ndim == 4 else each, tree
    )
    return laid_out


class Plateau:
    """Says when to stop: the loss is low enough, or has stopped falling. It looks every `check_every` iterations."""

    def __init__(self, attack: Matching) -> None:
        self.attack = attack
        self.reference, self.since = math.inf, 0

    def __call__(self, iteration: int, loss: float) -> bool:
        if iteration % self.attack.check_every:
            return False
        if self.attack.stop_below is not None and loss < self.attack.stop_below:
            return True
        if loss < 0.99 * self.reference:
            self.reference, self.since = loss, iteration
        return self.attack.patience is not None and iteration - self.since >= self.attack.patience
