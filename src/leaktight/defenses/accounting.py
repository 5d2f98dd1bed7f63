"""What a run of noisy steps costs in privacy. The mathematics of sampled steps is Opacus'; nothing here sees data.

A history is a list of pairs [sampling rate, number of steps]: plain values that a client keeps in its state.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np

from leaktight.core.errors import UsageError
from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.protocols import Report

Accountant: TypeAlias = Literal["rdp", "prv", "gdp"]
History: TypeAlias = Sequence[Sequence[Any]]

PRV_LIMIT = 50.0
"""Above this epsilon the numerical accountant takes minutes and gigabytes to say that there is hardly any privacy."""


def require_opacus() -> None:
    """Load Opacus, or say how to get it."""
    try:
        import opacus  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "differential privacy needs the package opacus for its accountant; pip install 'leaktight[dp]'"
        ) from error


def check_privacy_settings(*, clip_norm: float, noise_multiplier: float, delta: float) -> None:
    """The ranges that every defense with an accountant shares."""
    if not clip_norm > 0:
        raise ValueError(f"expected clip_norm > 0, got {clip_norm}")
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"expected noise_multiplier >= 0, got {noise_multiplier}")
    if noise_multiplier and clip_norm == math.inf:
        raise ValueError("expected a finite clip_norm to scale the noise with, got inf; set noise_multiplier = 0 too")
    if not 0 < delta < 1:
        raise ValueError(f"expected delta in (0, 1), got {delta}")


def counted(history: History, more: Iterable[tuple[float, int]]) -> list[list[Any]]:
    """The history with more steps in it; steps of one rate are counted together.

    >>> counted([[0.5, 2]], [(0.25, 1), (0.5, 1)])
    [[0.5, 3], [0.25, 1]]
    """
    steps: dict[float, int] = {}
    for rate, number in [*history, *more]:
        steps[rate] = steps.get(rate, 0) + number
    return [[rate, number] for rate, number in steps.items()]


def sampled_epsilon(history: History, *, noise_multiplier: float, delta: float, accountant: Accountant) -> float:
    """The epsilon of Gaussian steps, each on a Poisson sample of the examples (or clients) at the rate of its entry.

    noise_multiplier: standard deviation of the noise over the sensitivity of a step. Infinite where nothing is bounded.
    rdp: Rényi DP. prv: numerical, tightest; above `PRV_LIMIT` the value of rdp. gdp: a limit for many steps, which can
    be too low for few; rates may differ, as the squares of their mu add up.
    """
    if not history:
        return 0.0
    if not noise_multiplier:
        return math.inf
    return _ACCOUNTANTS[accountant](history, noise_multiplier, delta)


def uses_of_an_example(steps: int, steps_per_epoch: int | None) -> int:
    """How often any one example was used in a round of so many steps.

    steps_per_epoch: after how many steps an example may come again, as `fl.local.plan_batches` deals them. None: nobody
    knows, and every step may have used the same one.

    >>> uses_of_an_example(6, 3), uses_of_an_example(7, 3), uses_of_an_example(50, None)
    (2, 3, 50)
    """
    return steps if steps_per_epoch is None else math.ceil(steps / steps_per_epoch)


def report_budget(figures: Mapping[str, float], delta: float, report: Report) -> None:
    """Report those figures of epsilon that are finite, and their delta."""
    for name, value in figures.items():
        if math.isfinite(value):
            report(name, value)
    report("delta", delta)


def _rdp(history: History, noise_multiplier: float, delta: float) -> float:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    curve = sum(steps * np.array(_rdp_of_step(rate, noise_multiplier)) for rate, steps in history)
    with warnings.catch_warnings():
        # It tells that an order outside its list would give a tighter bound; this one holds.
        warnings.filterwarnings("ignore", message="Optimal order is the")
        epsilon, _ = get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=curve, delta=delta)
    return float(epsilon)


@lru_cache(maxsize=256)
def _rdp_of_step(rate: float, noise_multiplier: float) -> tuple[float, ...]:
    """A quarter of a second each time, so every process remembers it; a round asks for the same few rates."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = RDPAccountant.DEFAULT_ALPHAS
    return tuple(compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=orders).tolist())


def _prv(history: History, noise_multiplier: float, delta: float) -> float:
    from opacus.accountants import PRVAccountant

    bound = _rdp(history, noise_multiplier, delta)
    if not bound <= PRV_LIMIT:
        return bound
    accountant = PRVAccountant()
    accountant.history = [(noise_multiplier, rate, steps) for rate, steps in history]
    with np.errstate(divide="ignore"):  # at rate 1 it takes the logarithm of 0, which is right
        return float(accountant.get_epsilon(delta))


def _gdp(history: History, noise_multiplier: float, delta: float) -> float:
    from opacus.accountants.analysis.gdp import compute_mu_poisson

    with np.errstate(over="ignore"):
        squares = [
            float(compute_mu_poisson(steps=steps, noise_multiplier=np.float64(noise_multiplier), sample_rate=rate)) ** 2
            for rate, steps in history
        ]
    return gaussian_epsilon(math.sqrt(math.fsum(squares)), delta)


_ACCOUNTANTS: Mapping[Accountant, Callable[[History, float, float], float]] = {"rdp": _rdp, "prv": _prv, "gdp": _gdp}
