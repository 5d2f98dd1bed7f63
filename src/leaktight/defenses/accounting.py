"""Privacy accounting: the epsilon of a history of noisy steps. Opacus computes that of sampled steps.

A history is a list of pairs [sampling rate, number of steps], which a client keeps in its state.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.protocols import Report

Accountant: TypeAlias = Literal["rdp", "prv", "gdp"]
History: TypeAlias = Sequence[Sequence[float]]

PRV_LIMIT = 50.0
"""Above this epsilon, which is hardly any privacy, the prv accountant would take minutes and gigabytes."""


def require_opacus() -> None:
    """Raise an error that says how to install Opacus if it is missing."""
    try:
        import opacus  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "differential privacy needs the package opacus for its accountant; pip install 'leaktight[dp]'"
        ) from error


def check_privacy_settings(*, clip_norm: float, noise_multiplier: float, delta: float) -> None:
    """Raise ValueError unless these settings, which all defenses with an accountant share, are in range."""
    if not clip_norm > 0:
        raise ValueError(f"expected clip_norm > 0, got {clip_norm}")
    require_at_least(0, noise_multiplier=noise_multiplier)
    if noise_multiplier and clip_norm == math.inf:
        raise ValueError("expected a finite clip_norm to scale the noise with, got inf; set noise_multiplier = 0 too")
    if not 0 < delta < 1:
        raise ValueError(f"expected delta in (0, 1), got {delta}")


def counted(history: History, more: Iterable[tuple[float, int]]) -> list[list[float]]:
    """The history with more steps added; steps of the same rate become one entry.

    >>> counted([[0.5, 2]], [(0.25, 1), (0.5, 1)])
    [[0.5, 3], [0.25, 1]]
    """
    steps: dict[float, float] = {}
    for rate, number in [*history, *more]:
        steps[rate] = steps.get(rate, 0) + number
    return [[rate, number] for rate, number in steps.items()]


def sampled_epsilon(history: History, *, noise_multiplier: float, delta: float, accountant: Accountant) -> float:
    """The epsilon of Gaussian steps, each on a Poisson sample of the examples (or clients) at the rate of its entry.

    noise_multiplier: standard deviation of the noise over the sensitivity of a step; the epsilon of 0 is infinite.
    accountant: "rdp", Rényi DP; "prv", numerical and tightest, and the value of rdp above `PRV_LIMIT`; "gdp", the limit
    of many steps, which can be too low for few (the squares of mu of different rates add up).
    """
    if not history:
        return 0.0
    if not noise_multiplier:
        return math.inf
    return _ACCOUNTANTS[accountant](history, noise_multiplier, delta)


def uses_of_an_example(steps: int, steps_per_epoch: int | None) -> int:
    """The most steps of a round that used the same example.

    steps_per_epoch: the steps between two uses of an example, as `fl.local.plan_batches` plans them; None if unknown,
    when every step may have used the same example.

    >>> uses_of_an_example(6, 3), uses_of_an_example(7, 3), uses_of_an_example(50, None)
    (2, 3, 50)
    """
    return steps if steps_per_epoch is None else math.ceil(steps / steps_per_epoch)


def report_budget(figures: Mapping[str, float], delta: float, report: Report) -> None:
    """Report the finite values of epsilon by name, and their delta."""
    for name, value in figures.items():
        if math.isfinite(value):
            report(name, value)
    report("delta", delta)


def _rdp(history: History, noise_multiplier: float, delta: float) -> float:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    curve = sum(steps * np.array(_rdp_of_step(rate, noise_multiplier)) for rate, steps in history)
    with warnings.catch_warnings():
        # Opacus warns that an order outside its list would give a tighter bound; this bound holds too.
        warnings.filterwarnings("ignore", message="Optimal order is the")
        epsilon, _ = get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=curve, delta=delta)
    return float(epsilon)


@lru_cache(maxsize=256)
def _rdp_of_step(rate: float, noise_multiplier: float) -> tuple[float, ...]:
    """Rényi DP of one step, by order. Cached: it takes a quarter of a second, and a round repeats few rates."""
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
    with np.errstate(divide="ignore"):  # at rate 1 it computes log(0), which gives the right result
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
