"""Against noise: a scale-free distance, a prior as strong as the noise asks for, and the mean of repeated updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from leaktight.adaptive.knowing import Adaptation, scale_free
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.core.tensors import digest, squared_norm
from leaktight.core.types import Observation
from leaktight.defenses.noise import AdditiveNoise

_MUCH_CONTRAST = 0.3  # of the embedded digits; photographs have a third of it
_LEAST_SIGNAL = 0.1  # of the length of the update, where the noise alone would explain all of it


@dataclass(frozen=True, kw_only=True)
class KnowsNoise(Adaptation):
    """Noise of a known size on every entry: cosine, total variation weighed by the noise, repeated updates averaged.

    contrast: the mean difference of neighbouring pixels that the attacker expects of images; None: that of the public
    data where they are known, and 0.3 where not, which is much and so a careful prior.

    For noise of standard deviation s on an update u of a gradient g, the likeliest image minimises
    (1 - cosine) + s^2 / (|g| |u|) * (sum of differences / contrast); that is the weight of total variation. L-BFGS,
    which wants smooth losses, gets squared differences.
    Updates from the same weights are averaged before they are matched; updates from different weights are matched
    together, by the loop.
    Assumes: one and the same standard deviation everywhere; several observations, if given, are of the same examples.
    Cannot: undo noise that outweighs the gradient in one update. With several local steps of momentum or Adam the size
    of the noise in the change is not known; the prior is then the attack's own.
    """

    blurs: ClassVar[bool] = True

    contrast: float | None = None

    def __post_init__(self) -> None:
        if self.contrast is not None and not self.contrast > 0:
            raise ValueError(f"expected contrast > 0, got {self.contrast}")

    def noise_std(self, seen: Observation) -> float | None:
        """The standard deviation of the noise in an update as it was sent; None where it is not known."""
        assert isinstance(self.defense, AdditiveNoise)
        return self.defense.noise_std if self.defense.at == "update" else of_steps(self.defense.noise_std, seen)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        shown = averaged(seen)
        attack = replace(attack, objective=scale_free(attack.objective))
        std = self.noise_std(seen[0])
        if not std:
            return attack, shown
        contrast = self.contrast or usual_contrast(seen[0])
        weight = prior_weight(shown[0], std * math.sqrt(len(shown) / len(seen)), contrast)
        smooth = attack.optimizer.smooth
        # Gaussian differences of variance 2 contrast^2 for the smooth form, which counts each twice.
        variation = TotalVariation(form="squared") if smooth else TotalVariation()
        weight = weight / (8 * contrast) if smooth else weight
        rest = tuple((w, prior) for w, prior in attack.priors if not isinstance(prior, TotalVariation))
        own = max((w for w, prior in attack.priors if isinstance(prior, TotalVariation)), default=0.0)
        return replace(attack, priors=((max(weight, own), variation), *rest)), shown


def of_steps(step_std: float, seen: Observation) -> float | None:
    """The standard deviation in an update of noise that was added to the gradient of every local step."""
    local = seen.local_training
    if seen.update.kind == "gradient":
        return step_std
    if local is None or seen.batch_size is None or local.optimizer != "sgd" or local.momentum:
        return None
    return local.learning_rate * step_std * math.sqrt(local.num_steps(seen.batch_size))


def usual_contrast(seen: Observation) -> float:
    """The mean difference of neighbouring pixels in the public data, or what stands in for it."""
    if seen.public_data is None:
        return _MUCH_CONTRAST
    images = seen.public_data.inputs
    across, down = images[..., 1:] - images[..., :-1], images[..., 1:, :] - images[..., :-1, :]
    return max(float(across.abs().mean() + down.abs().mean()) / 2, 1e-3)


def prior_weight(seen: Observation, noise_std: float, contrast: float) -> float:
    """The weight of the mean absolute difference of pixels beside 1 - cosine; see `KnowsNoise`."""
    size = sum(tensor.numel() for tensor in seen.update.tensors.values())
    square = float(squared_norm(seen.update.tensors.values()))
    signal = max(square - size * noise_std**2, square * _LEAST_SIGNAL**2)
    pixels = seen.inputs.size * (seen.batch_size or 1)
    return noise_std**2 * pixels / (math.sqrt(signal * square) * contrast) if square else 0.0


def averaged(seen: Sequence[Observation]) -> list[Observation]:
    """One observation for all that are of the same weights, with the mean of their updates; in order."""
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
