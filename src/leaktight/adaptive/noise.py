"""Against noise, DP-SGD, Fed-CDP and client-level DP: a scale-free distance, a prior weighted by the noise level, and
the mean of repeated updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import harmonic_mean
from typing import ClassVar

import torch

from leaktight.adaptive.clipping import clipping_alike
from leaktight.adaptive.knowing import Adaptation, scale_free
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.view import View
from leaktight.core.errors import require_above
from leaktight.core.tensors import digest, squared_norm
from leaktight.core.types import Observation
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.noise import AdditiveNoise

_MUCH_CONTRAST = 0.3  # that of the embedded digits; photographs have a third of it
_LEAST_SIGNAL = 0.1  # in units of the length of the update, if the noise alone explains all of it


@dataclass(frozen=True, kw_only=True)
class KnowsNoise(Adaptation):
    """Noise of a known size on every entry: cosine, total variation weighed by the noise, repeated updates averaged.

    contrast: the expected mean difference of neighbouring pixels, > 0; None: that of the public data if disclosed, else
    0.3, which is high and gives a weak prior.

    For noise of standard deviation s on an update u of a gradient g, the most likely image minimises
    (1 - cosine) + s^2 / (|g| |u|) * (sum of differences / contrast); that is the weight of total variation. L-BFGS,
    which needs smooth losses, gets squared differences.
    Updates of the same weights are averaged before they are matched; updates of different weights are matched together.
    Assumes: one standard deviation for all entries; several observations are of the same examples.
    Cannot: undo noise that outweighs the gradient in one update. With several local steps of momentum or Adam the size
    of the noise in the change is unknown; the prior is then the attack's own.
    """

    blurs: ClassVar[bool] = True

    contrast: float | None = None

    def __post_init__(self) -> None:
        require_above(0, contrast=self.contrast)

    def noise_std(self, seen: Observation) -> float | None:
        """The standard deviation of the noise in an update as it was sent; None if unknown."""
        assert isinstance(self.defense, AdditiveNoise)
        return self.defense.noise_std if self.defense.at == "update" else of_steps(self.defense.noise_std, seen)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        shown = averaged(seen)
        attack = replace(attack, objective=scale_free(attack.objective))
        std = self.noise_std(seen[0])
        if not std:
            return attack, shown
        contrast = self.contrast or usual_contrast(seen[0])
        each_std = std * math.sqrt(len(shown) / len(seen))
        # The harmonic mean belongs to the mean signal of all updates.
        weight = harmonic_mean([prior_weight(each, each_std, contrast) for each in shown])
        smooth = attack.optimizer.smooth
        # Gaussian differences of variance 2 contrast^2 for the smooth form, which counts each twice.
        variation = TotalVariation(form="squared") if smooth else TotalVariation()
        weight = weight / (8 * contrast) if smooth else weight
        rest = tuple((w, prior) for w, prior in attack.priors if not isinstance(prior, TotalVariation))
        own = max((w for w, prior in attack.priors if isinstance(prior, TotalVariation)), default=0.0)
        return replace(attack, priors=((max(weight, own), variation), *rest)), shown


def of_steps(step_std: float, seen: Observation) -> float | None:
    """The standard deviation in the update of noise added to the gradient of every local step; None if unknown."""
    local = seen.local_training
    if seen.update.kind == "gradient":
        return step_std
    if local is None or seen.batch_size is None or local.optimizer != "sgd" or local.momentum:
        return None
    return local.learning_rate * step_std * math.sqrt(local.num_steps(seen.batch_size))


def usual_contrast(seen: Observation) -> float:
    """The mean difference of neighbouring pixels in the public data, or a constant if there are none."""
    if seen.public_data is None:
        return _MUCH_CONTRAST
    images = seen.public_data.inputs
    across, down = images[..., 1:] - images[..., :-1], images[..., 1:, :] - images[..., :-1, :]
    return max(float(across.abs().mean() + down.abs().mean()) / 2, 1e-3)


def prior_weight(seen: Observation, noise_std: float, contrast: float) -> float:
    """The weight of total variation beside 1 - cosine; see `KnowsNoise`."""
    size = sum(tensor.numel() for tensor in seen.update.tensors.values())
    square = float(squared_norm(seen.update.tensors.values()))
    signal = max(square - size * noise_std**2, square * _LEAST_SIGNAL**2)
    pixels = seen.inputs.size * (seen.batch_size or 1)
    return noise_std**2 * pixels / (math.sqrt(signal * square) * contrast) if square else 0.0


def averaged(seen: Sequence[Observation]) -> list[Observation]:
    """One observation for all with the same weights, with the mean of their updates, in order."""
    groups: dict[str, list[Observation]] = {}
    for each in seen:
        groups.setdefault(f"{each.update.kind} {digest(each.broadcast.params)}", []).append(each)
    return [_mean(group) for group in groups.values()]


def _mean(group: Sequence[Observation]) -> Observation:
    first = group[0]
    if len(group) == 1:
        return first
    names = [name for name in first.update.tensors if all(name in each.update.tensors for each in group)]
    tensors = {name: torch.stack([each.update.tensors[name] for each in group]).mean(0) for name in names}
    return replace(first, update=replace(first.update, tensors=tensors))


@dataclass(frozen=True, kw_only=True)
class KnowsDpSgd(KnowsNoise):
    """DP-SGD and Fed-CDP: each example's gradient is clipped alike, in the same groups; the rest as against noise.

    contrast: see `KnowsNoise`. Assumes: the clipping norm of the round, which follows from the settings.
    Cannot: reveal more than (epsilon, delta) allows, on average over secrets; with a useful budget that is nothing.
    """

    def noise_std(self, seen: Observation) -> float | None:
        assert isinstance(self.defense, DpSgd)
        local, count = seen.local_training, seen.batch_size or 1
        size = count if local is None else min(local.batch_size, count)
        clip_norm = self.defense.clip_norm_in(seen.broadcast.round)
        return of_steps(self.defense.noise_multiplier * clip_norm / size, seen) if math.isfinite(clip_norm) else None

    def view(self, view: View, seen: Observation) -> View:
        assert isinstance(self.defense, DpSgd)
        groups = self.defense.groups(list(view.params))
        clip_norm = self.defense.clip_norm_in(seen.broadcast.round)
        return clipping_alike(view, groups, clip_norm, num_examples=seen.batch_size or 1, each_example=True)


@dataclass(frozen=True, kw_only=True)
class KnowsClientDp(KnowsNoise):
    """Client-level DP: the whole update is only shortened by clipping, which the cosine does not see; then noise.

    contrast: see `KnowsNoise`. Assumes: the update of one client is seen. With noise_shares > 1 its noise is weak by
    design, and only secure aggregation protects it.
    Cannot: reveal more than (epsilon, delta) allows.
    """

    def noise_std(self, seen: Observation) -> float | None:
        assert isinstance(self.defense, ClientDp)
        std = self.defense.noise_multiplier * self.defense.clip_norm / math.sqrt(self.defense.noise_shares)
        return std if math.isfinite(std) else None
