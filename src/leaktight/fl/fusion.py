"""What clients get to see of each other's models when they validate them: mixtures instead of the models themselves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaktight.core.rng import Rng
from leaktight.crypto.cipher import integer_weights

Shares = Mapping[str, Mapping[str, int]]
"""For each client's mixture, the integer weight of every client's update in it; all mixtures have the same sum."""

_ROUNDING = 2**-22  # of float32, in which clients shorten updates: none may come out longer than noise is made for


@dataclass(frozen=True, kw_only=True)
class Fusion(ABC):
    """How the server mixes updates before clients validate them. scale: the sum of the integer weights of a mixture."""

    scale: int = 1000

    def __post_init__(self) -> None:
        if self.scale < 10:
            raise ValueError(f"expected scale >= 10, got {self.scale}")

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of an update that noise is calibrated for; None where there is no noise."""
        return None

    @abstractmethod
    def shares(self, clients: Sequence[str], *, rng: Rng) -> Shares:
        """The weights of one round."""

    def noise_std(self, shares: Shares) -> float:
        """The standard deviation of the noise on every value of every mixture."""
        return 0.0

    def noise_range(self, clients: int) -> tuple[float, float]:
        """Between which two numbers `noise_std` lies, whatever is drawn, in rounds of 2 to so many clients."""
        return 0.0, 0.0


@dataclass(frozen=True, kw_only=True)
class FixedFusion(Fusion):
    """Every mixture is 0.9 of one update, the rest in equal parts of the others; every client can undo it.

    own: the share of the update that a mixture stands for.
    Reference: Ren, thesis 2023, Eqn. (4.5), "DP fusion"; the share 0.9 is that of its published code.
    Differs from the paper: the thesis says that the server "randomly generates" the weights; its code has them fixed,
    and so has this. There is no noise, hence no differential privacy: who knows `own` solves N linear equations and has
    the updates (docs/fedboosting.md).
    """

    own: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.own < 1:
            raise ValueError(f"expected own in (0, 1), got {self.own}")

    def shares(self, clients: Sequence[str], *, rng: Rng) -> Shares:
        rest = (1 - self.own) / max(len(clients) - 1, 1)
        return {
            model: integer_weights({name: self.own if name == model else rest for name in clients}, self.scale)
            for model in clients
        }


@dataclass(frozen=True, kw_only=True)
class NoisyFusion(Fusion):
    """Mixtures with weights that only the server knows, drawn anew every round, and Gaussian noise on every value.

    own: the least and the largest share of the update that a mixture stands for; it is drawn evenly between, and what
    is left is dealt to the others at random. update_norm: clients scale a longer update down to this norm.
    noise_multiplier: the noise's standard deviation, as a multiple of how far all mixtures of a round together can move
    when one client's update is replaced by another.

    Assumes: no client colludes with the server, which knows weights and noise. Secret weights alone are no protection:
    a mixture is close to its update as it stands. What the noise gives is `epsilon`, for the mixtures and for nothing
    else: the aggregate itself, which everybody gets, carries no noise. A model with batch statistics is refused,
    because these are not clipped.
    """

    own: tuple[float, float] = (0.6, 0.9)
    update_norm: float = 1.0
    noise_multiplier: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 < self.own[0] <= self.own[1] < 1:
            raise ValueError(f"expected own as two shares in (0.5, 1), the smaller first, got {self.own}")
        for name in ("update_norm", "noise_multiplier"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")

    @property
    def clip_norm(self) -> float | None:
        return self.update_norm * (1 - _ROUNDING)

    def shares(self, clients: Sequence[str], *, rng: Rng) -> Shares:
        stream, (least, most) = rng.secret(), self.own
        result = {}
        for model in clients:
            own = least + (most - least) * float(stream.uniform(1)[0]) if len(clients) > 1 else 1.0
            others = [name for name in clients if name != model]
            parts = stream.exponential(len(others))  # over their sum: even over all ways to deal
            dealt = (1 - own) * parts / parts.sum()
            result[model] = integer_weights(dict(zip([model, *others], [own, *dealt], strict=True)), self.scale)
        return result

    def noise_std(self, shares: Shares) -> float:
        """A multiple of how far all mixtures move, taken together, when a client's update turns into its opposite."""
        clients = next(iter(shares.values()))
        columns = [math.hypot(*(row[name] / self.scale for row in shares.values())) for name in clients]
        return self.noise_multiplier * 2 * self.update_norm * max(columns)

    def noise_range(self, clients: int) -> tuple[float, float]:
        """From what a client's own mixture moves alone, to what others move who give it all that they give away."""
        rounding = 1 / self.scale
        other = min(1.0, 1 - self.own[0] + rounding)
        largest = math.hypot(1.0, other * math.sqrt(clients - 1))
        moved = self.noise_multiplier * 2 * self.update_norm
        return moved * (self.own[0] - rounding), moved * largest

    def epsilon(self, rounds: int, delta: float) -> float:
        """Of (epsilon, delta) differential privacy of the mixtures of so many rounds, one client replaced.

        Zero-concentrated: rho = 1 / (2 multiplier^2) a round; epsilon = rho + 2 sqrt(rho ln(1 / delta)) for their sum
        (Bun and Steinke 2016, propositions 1.6 and 1.3).
        """
        rho = rounds / (2 * self.noise_multiplier**2)
        return rho + 2 * math.sqrt(rho * math.log(1 / delta))
