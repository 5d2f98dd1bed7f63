"""Against DP-SGD, Fed-CDP and client-level DP: clip alike, and treat the noise as noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from leaktight.adaptive.clipping import clipping_alike
from leaktight.adaptive.noise import KnowsNoise, of_steps
from leaktight.attacks.matching.view import View
from leaktight.core.types import Observation
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.dp_sgd import DpSgd


@dataclass(frozen=True, kw_only=True)
class KnowsDpSgd(KnowsNoise):
    """DP-SGD and Fed-CDP: each example's gradient is clipped alike, in the same groups; the rest as against noise.

    contrast: as against noise. Assumes: the clipping norm of the round, which follows from the settings.
    Cannot: more than (epsilon, delta) allows, on average over secrets: with a useful budget nothing is expected of it.
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

    contrast: as against noise. Assumes: that the update of one client is seen. With noise_shares > 1 its noise is weak
    by design, and only secure aggregation hides it.
    Cannot: more than (epsilon, delta) allows.
    """

    def noise_std(self, seen: Observation) -> float | None:
        assert isinstance(self.defense, ClientDp)
        std = self.defense.noise_multiplier * self.defense.clip_norm / math.sqrt(self.defense.noise_shares)
        return std if math.isfinite(std) else None
