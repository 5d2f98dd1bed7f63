"""Robbing the Fed: a module before the network sorts images into bins, each with its own gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from leaktight.attacks.exact.analytic import answer, gradient_of
from leaktight.core.errors import ModelError, UsageError, require_above, require_at_least
from leaktight.core.protocols import ActiveAttack, Progress, require_seen
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Broadcast, Observation, Reconstruction
from leaktight.models.imprint import NAME, with_imprint
from leaktight.models.source import require_choice

Measure: TypeAlias = Literal["mean", "fourier", "random"]
Law: TypeAlias = Literal["public", "normal", "laplace"]
Activation: TypeAlias = Literal["relu", "hardtanh"]

_EMPTY = 1e-6
"""A bin whose bias gradient is below this fraction of the largest is empty."""

_PER_KNOT = 16
"""Public images for each estimated quantile of the measure; with fewer, bins have unequal mass."""


@dataclass(frozen=True, kw_only=True)
class RobbingTheFed(ActiveAttack):
    """Robbing the Fed: an imprint module before the first layer sorts images into bins; each bin of one image is exact.

    Every unit of the module computes the same measure of an image and is active above its own threshold, so the
    gradients of neighbouring units differ by the images between their thresholds: an image alone in its bin is the
    difference of weight gradients over that of bias gradients. Of N images in K bins of equal mass the fraction
    (1 - 1/K)^(N - 1) is alone.

    num_bins: K, >= 2. measure: the "mean" of the pixels, a "fourier" component, or a "random" projection.
    mode: which Fourier component, >= 1. law: the assumed distribution of the measure: that of "public" images, or
    "normal" or "laplace". center, spread: mean and standard deviation of "normal" and "laplace".
    form: "relu", or "hardtanh", whose units are active in their own bin only, so that nothing is subtracted.
    gain: factor on the measuring rows, > 0. disguise: relative noise on these rows, >= 0, so that they differ.

    Reference: Fowl et al., Robbing the Fed, ICLR 2022.
    Assumes: a server that sends another network, after one ordinary round that shows it the size of the images; one
    local step of plain gradient descent (further steps blur the bins). Labels, batch size and the mode of batch
    normalisation do not matter. It also works on the sum of many clients.
    Differs from published code: the next bin is subtracted, not the previous one, so that the top bin is isolated too;
    pixels are in [0, 1]; the default law is that of public images and the default measure `mean`.
    """

    num_bins: int = 256
    measure: Measure = "mean"
    mode: int = 32
    law: Law = "public"
    center: float = 0.5
    spread: float = 0.15
    form: Activation = "relu"
    gain: float = 1e-3
    disguise: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(2, num_bins=self.num_bins)
        require_choice("measure", self.measure, _ROWS)
        require_choice("law", self.law, ("public", *_LAWS))
        require_choice("form", self.form, get_args(Activation))
        require_above(0, spread=self.spread, gain=self.gain)
        require_at_least(0, disguise=self.disguise)
        require_at_least(1, mode=self.mode)

    @property
    def requires(self) -> frozenset[Knowledge]:
        return frozenset({Knowledge.PUBLIC_DATA} if self.law == "public" else ())

    @property
    def searches(self) -> bool:
        return False

    def expected_share(self, num_examples: int) -> float:
        """The fraction of images that are alone in their bin, for bins of equal mass.

        >>> round(RobbingTheFed(num_bins=256).expected_share(64), 3)
        0.781
        """
        return float((1 - 1 / self.num_bins) ** (num_examples - 1))

    def tamper(self, broadcast: Broadcast, seen: Sequence[Observation], *, rng: Rng) -> Broadcast | None:
        if not seen:
            return broadcast
        if len(seen) > 1:
            return None
        require(require_seen(self, seen), *self.requires)
        if broadcast.model is None:
            raise ModelError("expected the network beside its parameters, got none; give it in broadcast.model")
        inputs = seen[0].inputs
        row = _ROWS[self.measure](inputs.size, self.mode, rng.child("measure"))
        model = with_imprint(broadcast.model, inputs, self.num_bins, None if self.form == "relu" else self.gain)
        return replace(
            broadcast,
            params={**self._module(row, self._edges(row, seen[0]), rng.child("disguise")), **broadcast.params},
            model=model,
        )

    def _edges(self, row: Tensor, seen: Observation) -> Tensor:
        """The lower edges of the bins, (K,), ascending; the first is below the measure of every image."""
        shares = torch.arange(1, self.num_bins, dtype=torch.float64) / self.num_bins
        if self.law != "public" or seen.public_data is None:
            inner = torch.from_numpy(_LAWS[self.law](shares.numpy(), self.center, self.spread))
        else:
            measured = seen.public_data.inputs.double().flatten(1) @ row
            if len(measured) < 2 * _PER_KNOT:
                raise UsageError(f"expected {2 * _PER_KNOT} public images or more, got {len(measured)}; disclose more")
            knots = torch.linspace(0, 1, min(self.num_bins, len(measured) // _PER_KNOT) + 1, dtype=torch.float64)
            quantiles = measured.quantile(knots)
            inner = torch.from_numpy(np.interp(shares.numpy(), knots.numpy(), quantiles.numpy()))
        lowest = row.clamp(max=0).sum()
        return torch.cat([torch.minimum(lowest, inner[0])[None] - inner.std(), inner])

    def _module(self, row: Tensor, edges: Tensor, rng: Rng) -> dict[str, Tensor]:
        """The parameters of the module, by name."""
        noise = torch.randn(self.num_bins, len(row), generator=rng.public(), dtype=torch.float64)
        rows = row + self.disguise * row.norm() / math.sqrt(len(row)) * noise
        widths = torch.ones_like(edges)
        if self.form == "hardtanh":  # each unit rises from 0 to the gain within its bin
            widths = edges.diff(append=(edges[-1] + edges.diff()[1:].max())[None])
        typical = float(edges.std()) if self.form == "relu" else 1.0
        made = {
            "into.weight": self.gain * rows / widths[:, None],
            "into.bias": -self.gain * edges / widths,
            "back.weight": torch.full((len(row), self.num_bins), 1 / (self.num_bins * typical * self.gain)),
            "back.bias": torch.zeros(len(row)),
        }
        return {f"{NAME}.{name}": tensor.to(torch.float32) for name, tensor in made.items()}

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        last = seen[-1] if seen else None
        if last is None or f"{NAME}.into.weight" not in last.broadcast.params:
            raise UsageError("expected an update of a model with the imprint module, got none; the server must send it")
        gradient = gradient_of(last)
        weight, bias = (gradient.needed(f"{NAME}.into.{part}") for part in ("weight", "bias"))
        if self.form == "relu":
            weight, bias = (part.diff(dim=0, append=torch.zeros_like(part[:1])).neg() for part in (weight, bias))
        strength = bias.abs()
        order = strength.argsort(descending=True, stable=True)
        taken = order[strength[order] > _EMPTY * float(strength.max())][: last.batch_size]
        images = (weight[taken] / bias[taken, None]).reshape(-1, *last.inputs.shape)
        if progress is not None:
            progress(0, 0.0, images)
        notes = {
            "assumed": list(gradient.notes),
            "bins": self.num_bins,
            "images": len(taken),
            "expected_share": None if last.batch_size is None else self.expected_share(last.batch_size),
        }
        return answer(images, torch.zeros(len(taken), dtype=torch.long), 0.0, notes)


def _fourier_row(size: int, mode: int, rng: Rng) -> Tensor:
    places = torch.arange(size, dtype=torch.float64) + 0.5
    return torch.cos(math.pi / size * places * mode) * (4 * max(mode, 0.33) / size)


_ROWS: Mapping[str, Callable[[int, int, Rng], Tensor]] = {
    "mean": lambda size, mode, rng: torch.full((size,), 1 / size, dtype=torch.float64),
    "fourier": _fourier_row,
    "random": lambda size, mode, rng: torch.randn(size, generator=rng.public(), dtype=torch.float64) / math.sqrt(size),
}
_LAWS: Mapping[str, Callable[..., Any]] = {
    "normal": lambda shares, center, spread: stats.norm.ppf(shares, center, spread),
    "laplace": lambda shares, center, spread: stats.laplace.ppf(shares, center, spread / math.sqrt(2)),
}
"""Quantiles of a distribution: from probabilities, centre and standard deviation."""
