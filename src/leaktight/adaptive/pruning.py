"""Several local steps that were each pruned: the steps of a guess are pruned where those of the last guess were."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from leaktight.adaptive.knowing import mimicking, visible, weighing
from leaktight.adaptive.stages import Judging, update_of
from leaktight.attacks.matching.view import View
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Observation, Params, State
from leaktight.fl.local import silent


def pruned_steps(defense: Defense, seen: Observation) -> bool:
    """Whether an update is a sum over several steps that were each pruned."""
    return getattr(defense, "at", "step") == "step" and seen.update.kind == "delta" and (seen.num_steps or 1) > 1


@dataclass(frozen=True)
class PrunedAlike(Judging):
    """Prunes the steps of a guess: at first where the update is zero, then where the defense prunes the last guess.

    defense: one that prunes gradients of steps without randomness. layer: the only tensor that it prunes, which the
    first stage does not match; "" if it prunes the small entries of all.
    Where a step is still pruned wrongly, the update of the guess differs: such entries count little in the next stage.
    """

    defense: Defense
    layer: str = ""

    def judged(self, view: View, guessed: Params | None) -> View:
        steps, masks = len(view.steps), self._seen(view)
        if self.layer:
            sure = {name: torch.zeros_like(mask) for name, mask in masks.items()}
        else:
            sure = {name: surely_kept(view.target[name], steps).to(mask.dtype) for name, mask in masks.items()}
        return weighing(held_masks(view, [masks] * steps), sure, "steps are pruned where the update is zero")

    def after(self, view: View, guess: Batch | None) -> View:
        if not view.steps:
            return view
        if guess is None:
            return self.judged(view, None)
        masks: list[Params] = []
        recording = replace(view.trainer, defense=_Recording(self.defense, masks))
        update_of(replace(view, trainer=recording), guess)
        seen = self._seen(view)
        pruned = held_masks(view, [{name: mask[name] * own for name, own in seen.items()} for mask in masks])
        guessed = update_of(pruned, guess)
        trust = trusted({name: guessed[name] - tensor for name, tensor in view.target.items()}, view.target)
        return weighing(pruned, trust, "steps are pruned as those of an earlier guess are")

    def _seen(self, view: View) -> dict[str, Tensor]:
        """Masks of what the update shows of the tensors that the defense prunes."""
        return visible({name: each for name, each in view.target.items() if not self.layer or name == self.layer})


def trusted(differences: Params, target: Params) -> dict[str, Tensor]:
    """sqrt(m / (m + d^2)) of every entry with the difference d; m is the median square where the target is not zero."""
    visible = torch.cat([tensor[target[name] != 0] for name, tensor in differences.items()]).square()
    level = (visible.median() if len(visible) else visible.sum()) + torch.finfo(visible.dtype).tiny
    return {name: (level / (level + tensor.square())).sqrt() for name, tensor in differences.items()}


def surely_kept(tensor: Tensor, steps: int) -> Tensor:
    """Which entries no step can have pruned if all steps are alike: others would be below `steps` times the smallest.

    >>> surely_kept(torch.tensor([0.0, 1.0, 1.9, -3.0]), 2)
    tensor([False, False, False,  True])
    """
    sizes = tensor.abs()
    drawn = sizes[sizes > 0]
    return sizes >= steps * float(drawn.min()) if len(drawn) else sizes > 0


def held_masks(view: View, masks: list[Params]) -> View:
    """A view whose simulated steps are multiplied by these masks, by step and name."""
    held = {_mask(step, name): mask for step, each in enumerate(masks) for name, mask in each.items()}
    return mimicking(replace(view, held={**view.held, **held}), _Masked())


@dataclass(frozen=True)
class _Masked(Defense):
    """Multiplies the gradient of every step by the masks of the state."""

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        masked = dict(step.gradient)
        for name, tensor in step.gradient.items():
            if _mask(step.index, name) in state:
                masked[name] = tensor * state[_mask(step.index, name)]
        return masked, state


@dataclass(frozen=True)
class _Recording(Defense):
    """Applies a defense, and records which entries it left as they were."""

    defense: Defense
    masks: list[Params] = field(default_factory=list)

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        plain = {name: tensor.detach() for name, tensor in step.gradient.items()}
        sent, _ = self.defense.on_gradient(replace(step, gradient=plain), {}, rng=rng, report=silent)
        self.masks.append({name: (tensor == plain[name]).to(tensor.dtype) for name, tensor in sent.items()})
        return sent, state


def _mask(step: int, name: str) -> str:
    return f"mask.{step}:{name}"
