"""An attacker who is to tell two neighbouring data sets apart, many times, and what epsilon is at least by its success.

Who is (epsilon, delta)-private is told apart at rates with hits <= exp(epsilon) * false alarms + delta; rates that were
measured bound epsilon from below. Two bounds:

- `from_rates`: thresholds from one half of the trials, rates from the other, Clopper-Pearson intervals. It holds
  whatever is behind the numbers, and cannot exceed the logarithm of the number of trials by much.
- `from_separation`: the numbers are taken for normal with equal variances (which `shape` tests), and epsilon is that of
  a Gaussian mechanism with the least separation that the trials allow. It comes close to the truth.

`python -m tests.security.distinguish` prints the table of docs/results/privacy.md.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.secret import SecretStream

Numbers: TypeAlias = NDArray[Any]

DELTA = 1e-5
RATE_RISK = 0.05
"""How often `from_rates` may be too large: over two directions, and a rate of hits and of false alarms in each."""
SEPARATION_RISK = 0.001
"""How often `from_separation` may be too large; there are many cases, and the truth lies close by."""


@dataclass(frozen=True)
class Trials:
    """The attacker's number in independent trials: there, with what is to be hidden; absent, with its neighbour."""

    there: Numbers
    absent: Numbers

    @property
    def count(self) -> int:
        return len(self.there) + len(self.absent)


@dataclass(frozen=True)
class Claim:
    """What a method says of itself. reported: its figure. proven: `Defense.spent`, or the exact figure of its noise.

    if_poisson: what DP-SGD would say of batches drawn by Poisson sampling.
    """

    reported: float
    proven: float
    if_poisson: float | None = None


@dataclass(frozen=True)
class Run:
    """One run of a method. seen: the attacker's numbers. coins: in which of them the hidden thing was there."""

    seen: Numbers
    coins: Numbers
    claim: Claim


@dataclass(frozen=True)
class Case:
    """A method at one setting. separation: over the noise, in theory, so that the attacker can be seen to be strong.

    scene: makes what is to be run; called with a number, it runs once, with secret keys that follow from this number.
    tight: the share of epsilon, by the theory of this attacker, that has to be found.
    """

    method: str
    setting: str
    separation: float
    runs: int
    scene: Callable[[], Callable[[int], Run]]
    tight: float = 0.8


@dataclass(frozen=True)
class Found:
    """Epsilon from below, and what it was compared with. shape: the p-value of a normal law (Kolmogorov-Smirnov)."""

    claim: Claim
    trials: int
    from_rates: float
    from_separation: float
    separation: float
    shape: float


def attack(case: Case, *, runs: int | None = None) -> Found:
    """Run a case with keys of its own for every run, and bound its epsilon from below."""
    play = case.scene()
    done = [play(_number(case, index)) for index in range(runs or case.runs)]
    seen, coins = np.concatenate([run.seen for run in done]), np.concatenate([run.coins for run in done])
    trials = Trials(seen[coins], seen[~coins])
    apart, least = separation(trials)
    return Found(done[-1].claim, trials.count, from_rates(trials), gaussian_epsilon(least, DELTA), apart, shape(trials))


def from_rates(trials: Trials, delta: float = DELTA) -> float:
    """Epsilon from below with no assumption on the numbers but that trials are independent."""
    ways = ((trials.there, trials.absent), (-trials.absent, -trials.there))
    return max(0.0, *(_one_way(hits, alarms, delta) for hits, alarms in ways))


def _one_way(hits: Numbers, alarms: Numbers, delta: float) -> float:
    """The attacker says yes above a threshold: the best on the first half of the trials, tried on the second."""
    (tuning, hits), (quiet, alarms) = np.array_split(hits, 2), np.array_split(alarms, 2)
    thresholds = np.sort(np.concatenate([tuning, quiet]))
    best = thresholds[np.argmax(_log_ratio(tuning, quiet, thresholds, delta))]
    return float(_log_ratio(hits, alarms, best[None], delta)[0])


def _log_ratio(hits: Numbers, alarms: Numbers, thresholds: Numbers, delta: float) -> Numbers:
    """log((least rate of hits - delta) / largest rate of false alarms), at every threshold."""
    risk = RATE_RISK / 4
    few, many = _above(hits, thresholds), _above(alarms, thresholds)
    with np.errstate(invalid="ignore"):
        least = np.where(few > 0, stats.beta.ppf(risk, few, len(hits) - few + 1), 0.0)
        most = np.where(many < len(alarms), stats.beta.isf(risk, many + 1, len(alarms) - many), 1.0)
    result: Numbers = np.log(np.maximum(least - delta, 1e-300) / most)
    return result


def _above(values: Numbers, thresholds: Numbers) -> Numbers:
    return len(values) - np.searchsorted(np.sort(values), thresholds, side="right")


def separation(trials: Trials) -> tuple[float, float]:
    """The difference of the means over the standard deviation: the estimate, and the least at `SEPARATION_RISK`."""
    there, absent = len(trials.there), len(trials.absent)
    apart = float(trials.there.mean() - trials.absent.mean()) / _spread(trials)
    error = math.sqrt(1 / there + 1 / absent + apart**2 / (2 * trials.count))
    return apart, max(0.0, apart - float(stats.norm.isf(SEPARATION_RISK)) * error)


def shape(trials: Trials) -> float:
    """The p-value of both kinds of trials being normal with the same variance."""
    rest = np.concatenate([values - values.mean() for values in (trials.there, trials.absent)])
    return float(stats.kstest(rest / _spread(trials), "norm").pvalue)


def _spread(trials: Trials) -> float:
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in (trials.there, trials.absent))
    return math.sqrt(squares / (trials.count - 2))


def _number(case: Case, index: int) -> int:
    named = f"{case.method}|{case.setting}|{index}".encode()
    return int.from_bytes(hashlib.sha256(named).digest()[:16], "big")


@contextmanager
def weaker_noise(share: float) -> Iterator[None]:
    """All normal noise is this share of what it should be, and no accountant is told."""
    draw = SecretStream.normal

    def weak(self: SecretStream, *args: Any, **settings: Any) -> Numbers:
        return share * draw(self, *args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecretStream, "normal", weak)
        yield


HEAD = (
    "| method | setting | trials | ε reported | ε proven | ε ≥, by rates | ε ≥, Gaussian | μ, theory | μ, measured |"
    "\n|---|---|---|---|---|---|---|---|---|"
)


def row(case: Case, found: Found) -> str:
    """A line of the table."""
    claim = found.claim
    poisson = "" if claim.if_poisson is None else f" ({claim.if_poisson:.2f} if Poisson)"
    return (
        f"| {case.method} | {case.setting} | {found.trials} | {claim.reported:.2f}{poisson} | {claim.proven:.2f} | "
        f"{found.from_rates:.2f} | {found.from_separation:.2f} | {case.separation:.3f} | {found.separation:.3f} |"
    )


def main() -> None:
    from tests.security.neighbours import CASES, SHARES

    sys.stdout.write(HEAD + "\n")
    for case in (*CASES.values(), SHARES):
        sys.stdout.write(row(case, attack(case)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
