"""No attacker who tells neighbouring data sets apart finds more than the epsilon that a method reports.

The same attacker finds more as soon as there is less noise than reported: it would have noticed. The figures are in
docs/results/privacy.md.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
from tests.security.distinguish import (
    DELTA,
    Case,
    Found,
    Numbers,
    Trials,
    attack,
    from_rates,
    separation,
    shape,
    weaker_noise,
)
from tests.security.neighbours import CANARIES, CASES, SHARES, canaries, cdp, dp, full, make_client, sgd
from tests.seeds import replayed

from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.protocols import Defense
from leaktight.core.tensors import parameters_of
from leaktight.core.types import Broadcast
from leaktight.defenses.client_dp import ClientDp
from leaktight.fl.messages import Train

NORMAL = 1e-4
"""A p-value below which numbers are not taken for normal."""
RATES_SUFFICE = ["dp_sgd", "fed_cdp", "client_dp", "fusion", "paillier"]
"""Cases with enough trials for rates alone to exceed what is reported, where noise is far too weak."""


def noise(count: int, seed: int = 0) -> Numbers:
    drawn: Numbers = replayed(seed).public_numpy().normal(size=count)
    return drawn


@lru_cache
def found_in(name: str) -> Found:
    return attack(CASES[name])


def require_covered(case: Case, found: Found) -> None:
    """Reported is at least what was found, and what was found is not far from the truth."""
    covered = min(found.claim.reported, found.claim.proven)
    assert found.shape > NORMAL
    assert found.from_rates <= covered
    assert found.from_separation <= covered
    assert found.from_separation >= case.tight * gaussian_epsilon(case.separation, DELTA)


# --- the attacker ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [0.0, 0.5, 1.0, 2.0])
def test_bounds_lie_below_the_truth_and_not_far(apart: float) -> None:
    trials = Trials(noise(20000, 1) + apart, noise(20000, 2))
    truth = gaussian_epsilon(apart, DELTA)
    _, least = separation(trials)
    assert from_rates(trials) <= truth
    assert 0.85 * truth <= gaussian_epsilon(least, DELTA) <= truth
    assert shape(trials) > NORMAL


def test_rates_hold_whatever_the_shape() -> None:
    """Of numbers that give themselves away with probability delta, and only then, nothing is found."""
    rare = np.where(np.arange(20000) % 100000 == 0, 1e9, 0.0)
    assert from_rates(Trials(noise(20000, 1) + rare, noise(20000, 2))) == pytest.approx(0.0, abs=0.05)
    assert shape(Trials(noise(2000, 1) ** 3, noise(2000, 2))) < NORMAL


def test_what_can_be_told_apart_for_certain_counts_by_the_number_of_trials() -> None:
    bound = from_rates(Trials(noise(2000, 1) + 100, noise(2000, 2)))
    most = 1 - 0.0125 ** (1 / 1000)  # by Clopper and Pearson, after no false alarm in a thousand trials
    assert bound == pytest.approx(math.log((1 - most - DELTA) / most))


def test_rates_are_too_large_as_seldom_as_they_say() -> None:
    truth = gaussian_epsilon(0.5, 0.1)
    bounds = [from_rates(Trials(noise(400, 2 * i) + 0.5, noise(400, 2 * i + 1)), 0.1) for i in range(200)]
    assert np.mean(np.array(bounds) > truth) <= 0.05


# --- the methods ----------------------------------------------------------------------------------------------------


def test_a_small_case_of_all_below() -> None:
    case = CASES["dp_sgd"]
    found = attack(case, runs=100)
    require_covered(case, found)
    with weaker_noise(0.5):
        assert attack(case, runs=20).from_separation > found.claim.reported


def test_canaries_of_one_run_are_trials_of_their_own() -> None:
    runs = [sgd(dp(1.0), full(1))(number) for number in range(60)]
    rest = np.stack([run.seen - run.coins * np.mean(run.seen[run.coins]) for run in runs])
    sums = rest.sum(1) / (rest.std() * math.sqrt(CANARIES))
    assert np.abs(np.corrcoef(rest[:, :8].T) - np.eye(8)).max() < 0.6
    assert 0.5 < sums.std() < 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_found_is_covered_by_what_is_reported(name: str) -> None:
    require_covered(CASES[name], found_in(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "dp_sgd, order unknown"])
def test_half_the_noise_is_noticed(name: str) -> None:
    case = CASES[name]
    with weaker_noise(0.5):
        found = attack(case, runs=max(case.runs // 4, 20))
    assert found.from_separation > max(found.claim.reported, found.claim.proven)


@pytest.mark.slow
@pytest.mark.parametrize("name", RATES_SUFFICE)
def test_an_eighth_of_the_noise_is_noticed_by_rates_alone(name: str) -> None:
    with weaker_noise(0.125):
        found = attack(CASES[name])
    assert found.from_rates > max(found.claim.reported, found.claim.proven)


@pytest.mark.slow
def test_the_figure_for_poisson_sampling_holds_while_nobody_knows_the_order_of_batches() -> None:
    unknown, known = (found_in(f"dp_sgd, order {what}") for what in ("unknown", "known"))
    assert unknown.claim.if_poisson is not None
    assert known.claim.if_poisson is not None
    assert unknown.from_separation < unknown.claim.if_poisson
    assert known.claim.if_poisson < known.from_separation <= known.claim.proven


@pytest.mark.slow
def test_one_batch_used_fifty_times_counts_fifty_times() -> None:
    """Counted as one use, rates alone refute it."""
    found = found_in("wrap")
    assert gaussian_epsilon(1.0, DELTA) < found.from_rates < found.claim.reported
    assert found.claim.reported == pytest.approx(54.4, abs=0.05)


@pytest.mark.slow
def test_shares_of_noise_hide_a_client_in_the_sum_alone() -> None:
    found = attack(SHARES)
    assert found.shape > NORMAL
    assert gaussian_epsilon(1.0, DELTA) < found.from_separation <= found.claim.reported == found.claim.proven
    assert found.from_rates <= found.claim.proven


@pytest.mark.parametrize("defense", [dp(1.0), cdp(1.0), ClientDp()], ids=lambda defense: type(defense).__name__)
def test_a_client_answers_whether_a_gradient_overflows_or_not(defense: Defense) -> None:
    """The server sends a model in which one pixel overflows; whether it has an answer must not depend on the data."""
    coins = np.arange(CANARIES) == 0
    client = make_client(defense, canaries(coins), full(1), 0)
    params = {name: tensor.clone() for name, tensor in parameters_of(client.trainer.model).items()}
    for tensor in params.values():
        tensor[0, 0] = 3e38
    sent = client.train_round(Train(Broadcast(params, {}, 0), 0.1), None).trained.update
    assert all(bool(tensor.isfinite().all()) for tensor in sent.tensors.values())
