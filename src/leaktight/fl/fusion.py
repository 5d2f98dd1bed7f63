"""Fusion: clients validate mixtures of updates, so that they do not see each other's models."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaktight.core.errors import require_above, require_at_least
from leaktight.core.rng import Rng
from leaktight.crypto.cipher import integer_weights

MixtureWeights = Mapping[str, Mapping[str, int]]
"""For each client's mixture the integer weight of every client's update; all mixtures have the same sum."""

_ROUNDING = 2**-22  # of float32: no clipped update may be longer than the norm that noise is calibrated for


@dataclass(frozen=True, kw_only=True)
class Fusion(ABC):
    """How the server mixes updates. scale: the sum of the integer weights of a mixture, >= 10."""

    scale: int = 1000

    def __post_init__(self) -> None:
        require_at_least(10, scale=self.scale)

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of an update that noise is calibrated for; None if there is no noise."""
        return None

    @abstractmethod
    def shares(self, clients: Sequence[str], *, rng: Rng) -> MixtureWeights:
        """The weights of one round."""

    def noise_std(self, shares: MixtureWeights) -> float:
        """The standard deviation of the noise on every value of every mixture."""
        return 0.0

    def noise_range(self, clients: int) -> tuple[float, float]:
        """The smallest and largest possible `noise_std` in rounds of 2 to this many clients."""
        return 0.0, 0.0


@dataclass(frozen=True, kw_only=True)
class FixedFusion(Fusion):
    """Every mixture is 0.9 of one update, the rest in equal parts of the others; every client can undo it.

    own: the fraction of the client's own update in its mixture, in (0, 1).
    Reference: Ren, thesis 2023, Eqn. (4.5), "DP fusion"; the share 0.9 is that of its published code.
    Differs from the paper: the thesis says that the server "randomly generates" the weights; its code has them fixed,
    as here. There is no noise, hence no differential privacy: whoever knows `own` can solve N linear equations for the
    updates (docs/fedboosting.md).
    """

    own: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.own < 1:
            raise ValueError(f"expected own in (0, 1), got {self.own}")

    def shares(self, clients: Sequence[str], *, rng: Rng) -> MixtureWeights:
        rest = (1 - self.own) / max(len(clients) - 1, 1)
        return {
            model: integer_weights({name: self.own if name == model else rest for name in clients}, self.scale)
            for model in clients
        }


@dataclass(frozen=True, kw_only=True)
class NoisyFusion(Fusion):
    """Mixtures with weights that only the server knows, drawn anew every round, and Gaussian noise on every value.

    own: the least and the largest fraction of the client's own update in its mixture, in (0.5, 1); it is drawn
    uniformly, and the rest is divided among the other updates at random. update_norm: clients clip updates to this
    norm, > 0. noise_multiplier: the noise's standard deviation in units of the sensitivity: how far all mixtures of a
    round together can move when one client's update is replaced, > 0.

    Assumes: no client colludes with the server, which knows weights and noise. Secret weights alone are no protection,
    as a mixture is close to its update. The noise gives `epsilon` for the mixtures only: the aggregate, which everybody
    gets, has no noise. A model with batch statistics is refused, because these are not clipped.
    """

    own: tuple[float, float] = (0.6, 0.9)
    update_norm: float = 1.0
    noise_multiplier: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 < self.own[0] <= self.own[1] < 1:
            raise ValueError(f"expected own as two shares in (0.5, 1), the smaller first, got {self.own}")
        require_above(0, update_norm=self.update_norm, noise_multiplier=self.noise_multiplier)

    @property
    def clip_norm(self) -> float | None:
        return self.update_norm * (1 - _ROUNDING)

    def shares(self, clients: Sequence[str], *, rng: Rng) -> MixtureWeights:
        stream, (least, most) = rng.secret(), self.own
        result = {}
        for model in clients:
            own = least + (most - least) * float(stream.uniform(1)[0]) if len(clients) > 1 else 1.0
            others = [name for name in clients if name != model]
            parts = stream.exponential(len(others))  # divided by their sum: uniform on the simplex
            dealt = (1 - own) * parts / parts.sum()
            result[model] = integer_weights(dict(zip([model, *others], [own, *dealt], strict=True)), self.scale)
        return result

    def noise_std(self, shares: MixtureWeights) -> float:
        """The multiplier times the distance that all mixtures move together when a client's update changes its sign."""
        clients = next(iter(shares.values()))
        columns = [math.hypot(*(row[name] / self.scale for row in shares.values())) for name in clients]
        return self.noise_multiplier * 2 * self.update_norm * max(columns)

    def noise_range(self, clients: int) -> tuple[float, float]:
        """From a client in its own mixture only, to one that has all of the rest of every other mixture."""
        rounding = 1 / self.scale
        other = min(1.0, 1 - self.own[0] + rounding)
        largest = math.hypot(1.0, other * math.sqrt(clients - 1))
        moved = self.noise_multiplier * 2 * self.update_norm
        return moved * (self.own[0] - rounding), moved * largest

    def epsilon(self, rounds: int, delta: float) -> float:
        """Epsilon of the (epsilon, delta) differential privacy of all mixtures of these rounds, one client replaced.

        Zero-concentrated: rho = 1 / (2 multiplier^2) a round; epsilon = rho + 2 sqrt(rho ln(1 / delta)) for their sum
        (Bun and Steinke 2016, propositions 1.6 and 1.3).
        """
        rho = rounds / (2 * self.noise_multiplier**2)
        return rho + 2 * math.sqrt(rho * math.log(1 / delta))
