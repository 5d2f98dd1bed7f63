"""The matching loss as a problem for an optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import Joint
from leaktight.attacks.matching.objectives import Objective
from leaktight.attacks.matching.priors import BatchNormStatistics, GroupConsistency, ImagePrior
from leaktight.attacks.matching.registration import registered
from leaktight.attacks.matching.sought import SearchSpace
from leaktight.attacks.matching.view import Evidence, taken
from leaktight.attacks.optimizers.optimizer import Problem, Tree
from leaktight.core.devices import moved
from leaktight.core.rng import Rng
from leaktight.core.types import Batch
from leaktight.models.surgery import mode_of

Prior: TypeAlias = ImagePrior | BatchNormStatistics

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class MatchingProblem(Problem):
    """The distance between the update of a guess and the observed one, with the priors.

    evidence: the observed updates. space: the variables. objective: the distance; None to ignore the updates.
    priors: pairs of a weight and a prior. labels: the strategy that inferred the labels, or `Joint` to search for them.
    """

    evidence: Evidence
    space: SearchSpace
    objective: Objective | None
    priors: tuple[tuple[float, Prior], ...]
    labels: LabelStrategy | Joint

    def start(self, rng: Rng) -> Tree:
        variables = dict(self.space.draw(rng))
        if isinstance(self.labels, Joint):
            variables |= self.space.draw_labels(self.labels, rng.child("labels"))
        for place, (_, view, _) in enumerate(self.evidence.views):
            for name, unknown in view.unknowns.items():
                variables[_unknown(place, name)] = unknown.draw(rng.child("unknown", place, name)).to(self.precision)
        return moved(variables, self.device)

    def form(self) -> object:
        views = [
            (weight, view.trainer, view.steps, view.annealed, tuple(view.unknowns), view.trained, places)
            for weight, view, places in self.evidence.views
        ]
        return type(self), views, self.space.form(), self.objective, [prior for _, prior in self.priors]

    def loss(self, variables: Tree, group: Tree, constants: Tree, share: Tensor | None = None) -> Tensor:
        space, own = self.space, constants["sought"]
        images = space.images(variables, own)
        labels = constants["labels"] if "labels" in constants else space.label_logits(variables, own).softmax(1)
        weights = constants["priors"]
        terms = [weights[n] * self._penalty(prior, images, constants) for n, (_, prior) in enumerate(self.priors)]
        penalty = space.penalty(variables, own)
        if penalty is not None:
            terms.append(penalty)
        if self.objective is not None:
            for number, (weight, view, places) in enumerate(self.evidence.views):
                tensors = constants["views"][number]
                targets = tensors["slopes"].get("slopes", taken(labels, places))
                examples = taken(images, places), targets
                sought = {name: variables[_unknown(number, name)] for name in view.unknowns}
                buffers = view.buffers_at(share, tensors["buffers"])
                guess = view.guess(*examples, tensors["params"], buffers, {**tensors["held"], **sought})
                guess = view.weighted(guess, tensors["weights"])
                terms.append(weight * self.objective.loss(guess, tensors["prepared"]))
        if group:
            terms.append(group["pull"] * GroupConsistency().penalty(images, group["consensus"]))
        return torch.stack(terms).sum() if terms else images.sum() * 0

    def distance(self, variables: Tree) -> float:
        """The loss of these variables without priors, at least what its precision can tell from zero."""
        with torch.no_grad():
            loss = float(replace(self, priors=()).loss(variables, {}, self.constants))
        return max(loss, 2 * torch.finfo(self.precision).eps)

    def _penalty(self, prior: Prior, images: Tensor, constants: Tree) -> Tensor:
        if isinstance(prior, ImagePrior):
            return prior.penalty(images)
        _, view, _ = self.evidence.views[0]
        tensors = constants["views"][0]
        with mode_of(view.trainer.model, view.trainer.mode):
            return prior.penalty(
                images, view.trainer.model, tensors["params"], tensors["buffers"], tensors["statistics"]
            )

    def confined(self, variables: Tree) -> Tree:
        return self.space.confined(variables)

    @property
    def boxed(self) -> int:
        return self.space.boxed

    def noisy(self) -> Tree:
        return self.space.draw(self.rngs[0])

    def common(self, bests: Sequence[Tree], pull: float) -> Tree:
        mean = registered(torch.stack([self.images(each) for each in bests])).mean(0)
        return {"consensus": mean, "pull": mean.new_tensor(pull)}

    def images(self, variables: Tree) -> Tensor:
        """The images (N, C, H, W) of these variables."""
        with torch.no_grad():
            return self.space.images(variables, self.constants["sought"])

    def guess(self, variables: Tree) -> Batch:
        """The examples of these variables, images in float32."""
        images = self.images(variables).detach().to(torch.float32)
        if "labels" in self.constants:
            return Batch(images, self.constants["labels"])
        with torch.no_grad():
            return Batch(images, self.space.label_logits(variables, self.constants["sought"]).argmax(1))


def constants_of(
    evidence: Evidence,
    space: SearchSpace,
    objective: Objective | None,
    weights: Sequence[float],
    precision: torch.dtype,
) -> Tree:
    """The fixed tensors of the matching loss. weights: of the priors."""
    fixed: Tree = {
        "sought": space.constants,
        "priors": [torch.tensor(weight, dtype=precision) for weight in weights],
        "views": [
            {
                "params": dict(view.params),
                "buffers": dict(view.buffers),
                "weights": dict(view.weights),
                "held": dict(view.held),
                "slopes": {} if view.slopes is None else {"slopes": view.slopes},
                "statistics": dict(view.statistics),
                "prepared": {}
                if objective is None
                else objective.prepare(view.weighted(view.target, view.weights), view.trainer.model, evidence.shape),
            }
            for _, view, _ in evidence.views
        ],
    }
    return fixed if evidence.labels is None else {**fixed, "labels": evidence.labels}


def _unknown(view: int, name: str) -> str:
    """The name of an unknown of a view among the variables."""
    return f"{view}:{name}"
