"""Against FedKL: the scale and shift of every locked channel are searched for together with the images."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leaktight.adaptive.knowing import Adaptation, labels_from_bias, mimicking, weighing, without
from leaktight.adaptive.newton import EXPLAINED, can_refine, refined
from leaktight.adaptive.stages import until_explained
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import Unknown, View
from leaktight.core.errors import require_at_least
from leaktight.core.protocols import Defense, Progress, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import rms
from leaktight.core.types import Observation, Params, Reconstruction, State
from leaktight.defenses.fedkl import FedKl
from leaktight.models.keylock import LOCK, scale_blocks

_PULL = "fedkl.log_pull"
_SOLVED = 1e-12
_FAINT = 1e-6  # tensors smaller than this share of the largest count as if they were as large
_NEAR = 1e-7  # 1 - cosine of a start that is likely to lead to the solution
_SPREAD = 2.5  # of pixels: so wide that it only stops what the update leaves open
_ROUNDING = 3e-7  # of a gradient in float32, relative to the size of its tensor


@dataclass(frozen=True)
class _TrainedLocks(Defense):
    """Steps of a lock W k + b as steps of its coefficients: |k|^2 + 1 times as long, as W and b both move.

    The entries of the key are from U(0, 1), so that |k|^2 is about a third of its length; the logarithm of what is left
    of the factor is unknown.
    """

    key_length: int

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        factor = (self.key_length / 3 + 1) * state[_PULL].exp()
        locks = {name: factor * tensor for name, tensor in step.gradient.items() if f".{LOCK}." in name}
        return {**step.gradient, **locks}, state


@dataclass(frozen=True, kw_only=True)
class KnowsFedKl(Adaptation):
    """FedKL: the scales and shifts of the locked channels are unknowns of the search.

    spread: standard deviation of the first scales and shifts, around zero, >= 0; in a new lock it is about a third.
    restarts: the most starts, >= 1, unless the attack has more, as a search cannot change the sign of some scales; the
    first one that explains the update up to rounding is the last.

    Key and lock only scale and shift each channel: 2 O numbers for O channels. The gradients of the locked convolutions
    are matched too: without them exactly 2 O directions of images and locks leave the update as it is. Tensors count
    by the root of their size. After one step on few pixels the equations are then solved by Levenberg-Marquardt
    (`newton.py`). Labels that would be searched for are read from the last layer, which is not locked.
    Over several steps of SGD the locks of "paper" are followed, with the squared length of the key as one more unknown.
    They count as constant under Adam and within a stack, as do those of "code".
    Assumes: the architecture, which is public.
    Cannot: run a locked norm in evaluation mode, as its statistics are private. How bright a single image is shows only
    in the small number that batch norm adds to the variance, and least in a model change.
    """

    spread: float = 0.33
    restarts: int = 8

    def __post_init__(self) -> None:
        require_at_least(0, spread=self.spread)
        require_at_least(1, restarts=self.restarts)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        enough = _SOLVED if attack.stop_below is None else attack.stop_below
        attack = replace(attack, restarts=max(attack.restarts, self.restarts), stop_below=enough)
        scale_free = attack.objective is None or attack.objective.scale_free
        if scale_free and any((each.num_steps or 1) > 1 for each in seen):
            attack = until_explained(attack, seen, self.restarts)
        return labels_from_bias(attack, seen[0]), list(seen)

    def view(self, view: View, seen: Observation) -> View:
        assert isinstance(self.defense, FedKl)
        model = copy.deepcopy(view.trainer.model)
        blocks = scale_blocks(model, self.defense.blocks)
        like = next(iter(view.params.values()))
        buffers: dict[str, Tensor] = {
            f"{block.norm}.{LOCK}.{part}": getattr(model.get_submodule(f"{block.norm}.{LOCK}"), part).to(like).mul(0)
            for block in blocks
            for part in ("scale", "shift")
        }
        view = replace(
            view,
            trainer=replace(view.trainer, model=model),
            buffers={**view.buffers, **buffers},
            unknowns={**view.unknowns, **{name: Unknown(start, self.spread) for name, start in buffers.items()}},
            notes=(*view.notes, "scales and shifts of locked channels are unknown"),
        )
        if len(view.steps) > 1 and self._follows(view, seen):
            unknowns = {**view.unknowns, _PULL: Unknown(like.new_zeros(()))}
            view = replace(view, trained=tuple(buffers), unknowns=unknowns)
            view = mimicking(view, _TrainedLocks(self.defense.key_length))
        view = without(view, [f"{block.conv}.bias" for block in blocks], "a norm cancels the bias before it")
        sizes = {name: rms(tensor) for name, tensor in view.target.items()}
        least = _FAINT * max(sizes.values())
        weights = {name: torch.full_like(each, max(sizes[name], least) ** -0.5) for name, each in view.target.items()}
        return weighing(view, weights, "tensors count by the root of their size")

    def _follows(self, view: View, seen: Observation) -> bool:
        """Whether steps of the locks are steps of their coefficients: not with ReLU, under Adam, or behind clipping."""
        assert isinstance(self.defense, FedKl)
        alone = seen.defense == self.defense
        return alone and self.defense.variant == "paper" and view.trainer.local.optimizer == "sgd"

    def solve(
        self, attack: Matching, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None
    ) -> Reconstruction:
        evidence = attack.evidence(seen, rng=rng)
        if not can_refine(attack, evidence):
            return super().solve(attack, seen, rng=rng, progress=progress)
        errors = rounding(seen[0])
        once, answers, left = replace(attack, restarts=1), [], []
        for number in range(attack.restarts):
            own = rng if number == 0 else rng.child("start", number)
            left.append((once.search(evidence, rng=own, progress=progress), own))
            if left[-1][0].distance > _NEAR and number + 1 < attack.restarts:
                continue  # solving takes longer than another start
            near, own = left.pop(min(range(len(left)), key=lambda place: left[place][0].distance))
            solved, misfit = refined(once, evidence, near, errors, spread=_SPREAD, rng=own)
            answers.append((misfit, once.answer(evidence, solved)))
            if misfit < EXPLAINED:
                break
        return min(answers, key=lambda answer: answer[0])[1]


def rounding(seen: Observation) -> dict[str, Tensor]:
    """The standard deviation of what rounding adds to each entry of an update of one step, by name."""
    result = {}
    for name, tensor in seen.update.tensors.items():
        exact = tensor.detach().double()
        error = torch.full_like(exact, _ROUNDING * rms(exact))
        if seen.update.kind == "delta":  # a difference of parameters that were rounded
            weight = seen.broadcast.params[name].detach()
            error = error.hypot(torch.finfo(weight.dtype).eps / 4 * weight.double())
        result[name] = error
    return result
