"""OUTPOST: pruning, and noise on informative entries, with a probability that decays over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from leaktight.core.errors import require_at_least
from leaktight.core.protocols import ClientFacts, Defense, Report, RoundPlan, Step
from leaktight.core.rng import Rng
from leaktight.core.types import Params, State
from leaktight.defenses.perturbation import (
    percentile_value,
    require_finite,
    require_share,
    widened,
)
from leaktight.models.source import require_choice

Numbers: TypeAlias = npt.NDArray[np.floating]

_IMPRECISE = 1e-4
"""A variance below this share of the mean square is recomputed: float32 squares have a relative error of 6e-8."""


@dataclass(frozen=True, kw_only=True)
class Outpost(Defense):
    """Prunes small gradients, then adds noise where the Fisher information is high; less often at later steps.

    noise_scale: lambda; the noise on tensor d has standard deviation lambda r_d, with r_d = min(Var[w_d], 1). Weights
    that are a single number, or all equal, have variance 0 and get no noise.
    noise_share: phi; the share of entries with the highest Fisher information that get noise.
    prune_share: rho; the share of entries, per tensor, that become zero before the noise.
    decay: beta; local step i is perturbed with probability 1 / (1 + beta i), and step 1 always.
    count: i counts the steps of "all_rounds", or starts at 1 in every "round".
    fisher: "column": the mean of g^2 over the first dimension (the outputs), so that whole columns get noise, and a
    bias always; or "element": g^2 of each element, the diagonal.
    variant: "paper", or "code": one Fisher threshold for all tensors; i = epoch (batch + 1), counted in each round;
    step 1 is not forced, so that with the code's decay of 0.125 the true gradient is sent in 11 % of single-step
    rounds. The code's fixed seed, which makes all noise equal, and its own SGD step are left out.

    Reports fraction_perturbed (of the steps) and noise_std (lambda r_d of perturbed steps, averaged over weights).
    Reference: Wang, Hugh, Li, More Than Enough Is Too Much, IEEE/ACM ToN 2024 (OUTPOST), Algorithm 1.
    Assumes: nothing. r_d can be computed from the public weights; with columns, zeros reveal where there is no noise,
    and the other entries there are exact. Batch-norm weights get no noise at the start, since their variance is 0.
    Differs from the paper: its algorithm seems to restart i in every round, which is count="round". The average over
    columns is from the code; the paper's diagonal is fisher="element".
    """

    noise_scale: float = 0.8
    noise_share: float = 0.4
    prune_share: float = 0.8
    decay: float = 0.1
    count: Literal["all_rounds", "round"] = "all_rounds"
    fisher: Literal["column", "element"] = "column"
    variant: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        require_share(noise_share=self.noise_share, prune_share=self.prune_share)
        require_at_least(0, noise_scale=self.noise_scale, decay=self.decay)
        require_choice("count", self.count, ("all_rounds", "round"))
        require_choice("fisher", self.fisher, ("column", "element"))
        require_choice("variant", self.variant, ("paper", "code"))

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        return model, {"steps": 0, "steps_per_epoch": None}

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        return plan, {**state, "steps_per_epoch": plan.steps_per_epoch}

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        steps = state.get("steps", 0) + 1
        iteration = self.iteration(step.index, steps, state.get("steps_per_epoch"))
        forced = iteration == 1 and self.variant == "paper"
        # A hash costs a tenth of a generator, and most steps need only this number.
        perturbed = forced or _uniform(rng) < 1 / (1 + self.decay * iteration)
        report("fraction_perturbed", float(perturbed))
        gradient = self._perturb(step, rng, report) if perturbed else step.gradient
        return gradient, {**state, "steps": steps}

    def iteration(self, index: int, steps: int, steps_per_epoch: int | None) -> int:
        """i, from the index of the step in the round (0 first) and the client's steps so far (this one included)."""
        if self.variant == "code" and steps_per_epoch is not None:
            epoch, batch = divmod(index, steps_per_epoch)
            return (epoch + 1) * (batch + 1)
        return steps if self.count == "all_rounds" and self.variant == "paper" else index + 1

    @np.errstate(over="ignore")  # an infinite square is the highest information too
    def _perturb(self, step: Step, rng: Rng, report: Report) -> Params:
        """The pruned gradient with noise. In NumPy on flat arrays, which is faster than many small tensors."""
        names = [name for name, tensor in step.gradient.items() if tensor.numel()]
        gradients = [step.gradient[name] for name in names]
        sizes = [tensor.numel() for tensor in gradients]
        places = _slices(sizes)
        flat: Numbers = _flat(gradients).numpy()
        if not math.isfinite(flat @ flat):  # one product is faster than a check of every tensor
            require_finite(step.gradient)
        stds = self.noise_scale * np.minimum(variances(_flat([step.params[name] for name in names]).numpy(), places), 1)
        report("noise_std", float(stds @ sizes) / len(flat))
        noise = self._noise(flat, gradients, places, stds, rng) if self.noise_share and stds.any() else None
        if self.prune_share:
            magnitudes = np.abs(flat)
            thresholds = [percentile_value(magnitudes[place], self.prune_share) for place in places]
            # Copied, because a product with 0 would keep the sign.
            np.copyto(flat, 0, where=magnitudes < np.repeat(np.array(thresholds, flat.dtype), sizes))
        if noise is not None:
            flat += noise
        perturbed = dict(step.gradient)
        for name, tensor, place in zip(names, gradients, places, strict=True):
            shaped = torch.from_numpy(flat[place].reshape(tensor.shape))
            same = tensor.dtype == shaped.dtype and tensor.device == shaped.device  # asking is cheaper than `to`
            perturbed[name] = shaped if same else shaped.to(tensor)
        return perturbed

    def _noise(
        self, flat: Numbers, tensors: Sequence[Tensor], places: Sequence[slice], stds: Numbers, rng: Rng
    ) -> Numbers:
        """Noise for the entries of high Fisher information, zeros for the others."""
        noise: Numbers = rng.secret().normal(len(flat), flat.dtype.type)
        rows = [tensor.shape[0] if tensor.ndim and self.fisher == "column" else 1 for tensor in tensors]
        widths = [tensor.numel() // count for tensor, count in zip(tensors, rows, strict=True)]
        columns, squares = _slices(widths), np.square(flat)
        fishers = np.empty(sum(widths), flat.dtype)
        for place, own, count in zip(places, columns, rows, strict=True):
            np.add.reduce(squares[place].reshape(count, -1), 0, out=fishers[own])
        if self.variant == "code":
            fishers /= np.repeat(np.array(rows, flat.dtype), widths)
            thresholds = [percentile_value(fishers, 1 - self.noise_share)] * len(columns)
        else:
            thresholds = [percentile_value(fishers[own], 1 - self.noise_share) for own in columns]
        scales = np.repeat(stds.astype(flat.dtype), widths)
        scales *= fishers >= np.repeat(np.array(thresholds, flat.dtype), widths)
        for place, own, count in zip(places, columns, rows, strict=True):
            values = noise[place].reshape(count, -1)  # a view, so that `noise` itself is scaled
            values *= scales[own]
        return noise


def variances(flat: Numbers, places: Sequence[slice]) -> Numbers:
    """The variance of the numbers in each of the consecutive slices; 0 for one number, or for equal ones.

    >>> variances(np.array([1.0, 3.0, 0.1, 0.7, 0.7, 0.7]), [slice(0, 2), slice(2, 3), slice(3, 6)])
    array([2., 0., 0.])
    """
    starts = [place.start for place in places]
    counts = np.array([place.stop - place.start for place in places])
    sums = np.add.reduceat(flat, starts, dtype=np.float64)
    squares = np.add.reduceat(np.square(flat), starts, dtype=np.float64)
    spreads = squares - sums * sums / counts
    for index in ((spreads != 0) & (spreads < _IMPRECISE * squares)).nonzero()[0].tolist():
        part = flat[places[index]] - flat[starts[index]]  # exact for close numbers, and 0 if all are equal
        spreads[index] = part @ part - np.add.reduce(part) ** 2 / len(part)
    result: Numbers = np.maximum(spreads, 0) / np.maximum(counts - 1, 1)
    return result


def _slices(sizes: Sequence[int]) -> list[slice]:
    """Consecutive slices of these sizes."""
    return [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _uniform(rng: Rng) -> float:
    """A uniform draw from [0, 1)."""
    return int.from_bytes(rng.child("coin").secret_bytes(8), "big") / 2**64


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in a new vector on the CPU, in float32 at least."""
    return widened(torch.cat([tensor.reshape(-1) for tensor in tensors]).detach()).cpu()
