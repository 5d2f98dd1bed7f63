"""OUTPOST: pruning, and noise on informative entries, with a probability that decays over the steps."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from leaktight.core.errors import require_at_least
from leaktight.core.protocols import ClientFacts, Defense, Report, RoundPlan, Step
from leaktight.core.rng import Rng
from leaktight.core.types import Params, State, Update
from leaktight.defenses.perturbation import (
    percentile_values,
    require_finite,
    require_share,
    widened,
)
from leaktight.models.source import require_choice

Numbers: TypeAlias = npt.NDArray[np.floating]
Indices: TypeAlias = npt.NDArray[np.intp]

_IMPRECISE = 1e-8
"""A variance below this share of the mean square is recomputed from differences."""
_AHEAD = 16
"""Steps for which it is decided at once whether they are perturbed; most steps then need one look-up."""
_BLOCK = 1 << 16
"""Numbers of noise that are drawn at least: to open a stream takes as long as to draw some thousands."""
_NOTHING_DRAWN: State = MappingProxyType({"chosen": b"", "noise": None})
"""No secret of a round outlives it."""


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
        return model, {"steps": 0, "steps_per_epoch": None, **_NOTHING_DRAWN}

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        return plan, {**state, "steps_per_epoch": plan.steps_per_epoch, **_NOTHING_DRAWN}

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        chosen = state["chosen"]
        if step.index >= len(chosen):
            chosen = chosen.ljust(step.index, b"\0") + self._choose(step.index, state, rng.child("chosen"))
        perturbed = chosen[step.index]
        report("fraction_perturbed", perturbed)
        state = {**state, "steps": state["steps"] + 1, "chosen": chosen}
        return self._perturb(step, state, rng, report) if perturbed else (step.gradient, state)

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        return update, {**state, **_NOTHING_DRAWN}

    def _choose(self, index: int, state: State, rng: Rng) -> bytes:
        """Which of the next steps are perturbed, a byte for each; several at once, which costs no more."""
        steps, epoch = state["steps"] + 1, state["steps_per_epoch"]
        forced = 1 if self.variant == "paper" else 0
        draws = struct.unpack(f"<{_AHEAD}I", rng.secret_bytes(4 * _AHEAD))
        numbers = [self.iteration(index + later, steps + later, epoch) for later in range(_AHEAD)]
        return bytes(i == forced or draw < 2**32 / (1 + self.decay * i) for i, draw in zip(numbers, draws, strict=True))

    def iteration(self, index: int, steps: int, steps_per_epoch: int | None) -> int:
        """i, from the index of the step in the round (0 first) and the client's steps so far (this one included)."""
        if self.variant == "code" and steps_per_epoch is not None:
            epoch, batch = divmod(index, steps_per_epoch)
            return (epoch + 1) * (batch + 1)
        return steps if self.count == "all_rounds" and self.variant == "paper" else index + 1

    @np.errstate(over="ignore")  # an infinite square is the highest information too
    def _perturb(self, step: Step, state: State, rng: Rng, report: Report) -> tuple[Params, State]:
        """The pruned gradient with noise. In NumPy on flat arrays, which is faster than many small tensors."""
        names = [name for name, tensor in step.gradient.items() if tensor.numel()]
        gradients = [step.gradient[name] for name in names]
        sizes = [tensor.numel() for tensor in gradients]
        places = _slices(sizes)
        flat: Numbers = _flat(gradients).numpy()
        squares = np.square(flat)
        if not math.isfinite(np.add.reduce(squares)):  # one sum is faster than a check of every tensor
            require_finite(step.gradient)
        spreads = variances(_flat([step.params[name] for name in names]).numpy(), places)
        stds = [self.noise_scale * min(spread, 1.0) for spread in spreads]
        report("noise_std", sum(std * size for std, size in zip(stds, sizes, strict=True)) / len(flat))
        if self.prune_share:
            magnitudes = np.abs(flat)
            thresholds = percentile_values(magnitudes, places, self.prune_share)
            # Copied, because a product with 0 would keep the sign.
            np.copyto(flat, 0, where=magnitudes < np.repeat(thresholds, sizes))
        if self.noise_share and any(stds):
            chosen, counts = self._informative(squares, gradients, places)
            noise, rest = _drawn(state["noise"], len(chosen), flat.dtype.type, rng)
            flat[chosen] += noise * np.repeat(np.array(stds, flat.dtype), counts)
            state = {**state, "noise": rest}
        perturbed = dict(step.gradient)
        for name, tensor, place in zip(names, gradients, places, strict=True):
            shaped = torch.from_numpy(flat[place].reshape(tensor.shape))
            same = tensor.dtype == shaped.dtype and tensor.device == shaped.device  # asking is cheaper than `to`
            perturbed[name] = shaped if same else shaped.to(tensor)
        return perturbed, state

    def _informative(
        self, squares: Numbers, tensors: Sequence[Tensor], places: Sequence[slice]
    ) -> tuple[Indices, list[int]]:
        """Where the Fisher information is high, and how many of these entries are in each tensor.

        squares: of the gradient. places: of the tensors in it.
        """
        rows = [tensor.shape[0] if tensor.ndim and self.fisher == "column" else 1 for tensor in tensors]
        widths = [tensor.numel() // count for tensor, count in zip(tensors, rows, strict=True)]
        columns = _slices(widths)
        fishers = np.empty(sum(widths), squares.dtype)
        for place, own, count in zip(places, columns, rows, strict=True):
            np.add.reduce(squares[place].reshape(count, -1), 0, out=fishers[own])
        if self.variant == "code":
            fishers /= np.repeat(np.array(rows, squares.dtype), widths)
            whole = percentile_values(fishers, [slice(0, len(fishers))], 1 - self.noise_share)
            thresholds = np.repeat(whole, len(columns))
        else:
            thresholds = percentile_values(fishers, columns, 1 - self.noise_share)
        high = fishers >= np.repeat(thresholds, widths)
        mask = np.empty(len(squares), bool)
        for place, own, count in zip(places, columns, rows, strict=True):
            mask[place].reshape(count, -1)[:] = high[own]
        inside = np.add.reduceat(high, [own.start for own in columns], dtype=np.int64).tolist()
        return mask.nonzero()[0], [count * number for count, number in zip(rows, inside, strict=True)]


def _drawn(before: Tensor | None, count: int, kind: type[np.floating], rng: Rng) -> tuple[Numbers, Tensor]:
    """Normal noise (count,), and what is left of it for later steps. before: what was left."""
    kept: Numbers | None = None if before is None else before.cpu().numpy()
    if kept is None or len(kept) < count or kept.dtype != kind:
        kept = rng.secret().normal(max(count, _BLOCK), np.float32 if kind == np.float32 else np.float64)
    return kept[:count], torch.from_numpy(kept[count:])


def variances(flat: Numbers, places: Sequence[slice]) -> list[float]:
    """The variance of the numbers in each of the consecutive slices; 0 for one number, or for equal ones.

    >>> variances(np.array([1.0, 3.0, 0.1, 0.7, 0.7, 0.7]), [slice(0, 2), slice(2, 3), slice(3, 6)])
    [2.0, 0.0, 0.0]
    """
    starts = [place.start for place in places]
    numbers = flat.astype(np.float64)
    sums = np.add.reduceat(numbers, starts).tolist()
    squares = np.add.reduceat(np.multiply(numbers, numbers, out=numbers), starts).tolist()
    result = []
    for place, total, square in zip(places, sums, squares, strict=True):
        count = place.stop - place.start
        spread = square - total * total / count
        if spread < _IMPRECISE * square:
            part = flat[place] - flat[place.start]  # exact for close numbers, and 0 if all are equal
            spread = max(0.0, float(part @ part - np.add.reduce(part) ** 2 / count))
        result.append(spread / max(count - 1, 1))
    return result


def _slices(sizes: Sequence[int]) -> list[slice]:
    """Consecutive slices of these sizes."""
    return [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in a new vector on the CPU, in float32 at least."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).detach()
    return flat if flat.dtype == torch.float32 and flat.device.type == "cpu" else widened(flat).cpu()
