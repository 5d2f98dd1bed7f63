"""The loss of a guess as a pure function of tensors, and where restarts begin: what optimisers minimise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import Joint
from leaktight.attacks.matching.objectives import Objective
from leaktight.attacks.matching.priors import BatchNormStatistics, GroupConsistency, ImagePrior
from leaktight.attacks.matching.sought import Form
from leaktight.attacks.matching.view import Evidence, taken
from leaktight.attacks.optimizers.optimizer import Problem
from leaktight.attacks.optimizers.trees import Tree
from leaktight.core.rng import Rng
from leaktight.core.types import Batch
from leaktight.models.surgery import mode_of

Prior: TypeAlias = ImagePrior | BatchNormStatistics

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class MatchingProblem(Problem):
    """Examples whose update comes close to the observed one.

    evidence: what is matched. form: what is unknown. objective: the distance between updates (None: it is not looked
    at). priors: pairs of weight and prior. labels: how labels are known, or `Joint` where they are searched for.
    """

    evidence: Evidence
    form: Form
    objective: Objective | None
    priors: tuple[tuple[float, Prior], ...]
    labels: LabelStrategy | Joint

    def start(self, rng: Rng) -> Tree:
        variables = dict(self.form.draw(rng))
        if isinstance(self.labels, Joint):
            variables |= self.form.draw_labels(self.labels, rng.child("labels"))
        for place, (_, view, _) in enumerate(self.evidence.views):
            for name, unknown in view.unknowns.items():
                variables[_unknown(place, name)] = unknown.draw(rng.child("unknown", place, name)).to(self.precision)
        return variables

    def loss(self, variables: Tree, group: Tree, constants: Tree, share: Tensor | None = None) -> Tensor:
        form, own = self.form, constants["sought"]
        images = form.images(variables, own)
        labels = constants["labels"] if "labels" in constants else form.label_logits(variables, own).softmax(1)
        terms = [weight * self._penalty(prior, images, constants) for weight, prior in self.priors]
        unlikely = form.penalty(variables, own)
        if unlikely is not None:
            terms.append(unlikely)
        if self.objective is not None:
            for number, (weight, view, places) in enumerate(self.evidence.views):
                tensors = constants["views"][number]
                examples = taken(images, places), taken(labels, places)
                unknowns = {name: variables[_unknown(number, name)] for name in view.unknowns}
                buffers = view.buffers_at(share, tensors["buffers"])
                guess = view.guess(*examples, tensors["params"], buffers, unknowns)
                guess = view.weighted(guess, tensors["weights"])
                terms.append(weight * self.objective.loss(guess, tensors["prepared"]))
        if group:
            terms.append(group["pull"] * GroupConsistency().penalty(images, group["consensus"]))
        return torch.stack(terms).sum() if terms else images.sum() * 0

    def _penalty(self, prior: Prior, images: Tensor, constants: Tree) -> Tensor:
        if isinstance(prior, ImagePrior):
            return prior.penalty(images)
        _, view, _ = self.evidence.views[0]
        tensors = constants["views"][0]
        with mode_of(view.trainer.model, view.trainer.mode):
            return prior.penalty(images, view.trainer.model, tensors["params"], tensors["buffers"])

    def confined(self, variables: Tree) -> Tree:
        return self.form.confined(variables)

    @property
    def boxed(self) -> int:
        return self.form.boxed

    def noisy(self) -> Tree:
        return self.form.draw(self.rngs[0])

    def common(self, bests: Sequence[Tree], pull: float) -> Tree:
        mean = torch.stack([self.images(each) for each in bests]).mean(0)
        return {"consensus": mean, "pull": mean.new_tensor(pull)}

    def images(self, variables: Tree) -> Tensor:
        """The images that these variables stand for."""
        with torch.no_grad():
            return self.form.images(variables, self.constants["sought"])

    def guess(self, variables: Tree) -> Batch:
        """The examples that these variables stand for, images in float32."""
        images = self.images(variables).detach().to(torch.float32)
        if "labels" in self.constants:
            return Batch(images, self.constants["labels"])
        with torch.no_grad():
            return Batch(images, self.form.label_logits(variables, self.constants["sought"]).argmax(1))


def constants_of(evidence: Evidence, form: Form, objective: Objective | None) -> Tree:
    """The tensors that a loss needs and that never change."""
    fixed: Tree = {
        "sought": form.constants,
        "views": [
            {
                "params": dict(view.params),
                "buffers": dict(view.buffers),
                "weights": dict(view.weights),
                "prepared": {}
                if objective is None
                else objective.prepare(view.weighted(view.target, view.weights), view.trainer.model, evidence.shape),
            }
            for _, view, _ in evidence.views
        ],
    }
    return fixed if evidence.labels is None else {**fixed, "labels": evidence.labels}


def _unknown(view: int, name: str) -> str:
    """The name of a view's unknown among the variables of a search."""
    return f"{view}:{name}"
