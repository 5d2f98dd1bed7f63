from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
from opacus.accountants.accountant import IAccountant
from tests.seeds import replayed

from leaktight.core.errors import UsageError
from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.training import LocalTraining
from leaktight.defenses.accounting import (
    Accountant,
    require_opacus,
    sampled_epsilon,
    uses_of_an_example,
)
from leaktight.fl.local import plan_batches

THEIRS: dict[Accountant, type[IAccountant]] = {"rdp": RDPAccountant, "prv": PRVAccountant, "gdp": GaussianAccountant}


def by_opacus(kind: Accountant, steps: list[tuple[float, float]], delta: float) -> float:
    """Opacus' accountant, told every step as its users do: pairs of noise multiplier and sampling rate."""
    accountant = THEIRS[kind]()
    for noise_multiplier, rate in steps:
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)
    return float(accountant.get_epsilon(delta))


@pytest.mark.filterwarnings("ignore:GDP accounting")
@pytest.mark.parametrize("kind", THEIRS)
def test_epsilon_is_that_of_opacus(kind: Accountant) -> None:
    ours = sampled_epsilon([[0.1, 30]], noise_multiplier=1.3, delta=1e-5, accountant=kind)
    assert ours == pytest.approx(by_opacus(kind, [(1.3, 0.1)] * 30, 1e-5), rel=1e-9)


@pytest.mark.parametrize("kind", ["rdp", "prv"])
def test_steps_of_several_rates_add_up_as_in_opacus(kind: Accountant) -> None:
    steps = [(1.1, 0.2)] * 4 + [(1.1, 0.05)] * 2
    ours = sampled_epsilon([[0.2, 4], [0.05, 2]], noise_multiplier=1.1, delta=1e-4, accountant=kind)
    assert ours == pytest.approx(by_opacus(kind, steps, 1e-4), rel=1e-9)


def test_the_squares_of_mu_add_up_under_gdp() -> None:
    """Four steps at a rate and one at twice the rate are eight steps."""
    mixed = sampled_epsilon([[0.1, 4], [0.2, 1]], noise_multiplier=1.0, delta=1e-5, accountant="gdp")
    plain = sampled_epsilon([[0.1, 8]], noise_multiplier=1.0, delta=1e-5, accountant="gdp")
    assert mixed == pytest.approx(plain, rel=1e-9)


@given(
    multiplier=st.floats(0.6, 20),
    rate=st.floats(0.01, 1),
    steps=st.integers(1, 500),
    kind=st.sampled_from(["rdp", "gdp"]),
)
@settings(max_examples=6, deadline=None)
def test_more_steps_cost_more_and_more_noise_costs_less(
    multiplier: float, rate: float, steps: int, kind: Accountant
) -> None:
    def spent(steps: int, multiplier: float) -> float:
        return sampled_epsilon([[rate, steps]], noise_multiplier=multiplier, delta=1e-5, accountant=kind)

    once = spent(steps, multiplier)
    assert 0 <= spent(steps, 2 * multiplier) <= once <= spent(2 * steps, multiplier)


def test_no_steps_cost_nothing_and_no_noise_costs_everything() -> None:
    assert sampled_epsilon([], noise_multiplier=1.0, delta=1e-5, accountant="rdp") == 0
    assert sampled_epsilon([[0.1, 1]], noise_multiplier=0.0, delta=1e-5, accountant="rdp") == math.inf
    assert sampled_epsilon([[0.1, 1]], noise_multiplier=1e-3, delta=1e-5, accountant="gdp") == math.inf


def test_where_prv_would_take_minutes_the_bound_of_rdp_stands_in() -> None:
    arguments = {"noise_multiplier": 0.3, "delta": 1e-5}
    numerical = sampled_epsilon([[0.2, 250]], accountant="prv", **arguments)
    assert numerical == sampled_epsilon([[0.2, 250]], accountant="rdp", **arguments) > 300


@pytest.mark.parametrize("mu", [0.05, 0.5, 2.0, 9.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_exact_epsilon_of_a_gaussian_gives_back_delta(mu: float, delta: float) -> None:
    """The definition itself: the mass that the likelier of two Gaussians has above exp(epsilon) times the other."""
    from scipy.integrate import quad
    from scipy.stats import norm

    epsilon = gaussian_epsilon(mu, delta)
    edge = epsilon / mu + mu / 2  # where the log of the ratio of N(mu, 1) to N(0, 1) is epsilon
    mass, _ = quad(lambda x: norm.pdf(x - mu) - math.exp(epsilon) * norm.pdf(x), edge, edge + 40, points=[edge + 1])
    assert mass == pytest.approx(delta, rel=1e-4)


@pytest.mark.parametrize("uses", [1, 4])
def test_without_sampling_the_accountants_bound_the_exact_epsilon(uses: int) -> None:
    exact = gaussian_epsilon(math.sqrt(uses) / 2, 1e-5)
    by_rdp = sampled_epsilon([[1.0, uses]], noise_multiplier=2.0, delta=1e-5, accountant="rdp")
    by_prv = sampled_epsilon([[1.0, uses]], noise_multiplier=2.0, delta=1e-5, accountant="prv")
    assert exact < by_prv < exact + 0.03 < by_rdp < 1.3 * exact


@given(
    num_examples=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    samples=st.none() | st.integers(1, 40),
    epochs=st.integers(1, 3),
    steps=st.none() | st.integers(1, 12),
    drop_last=st.booleans(),
)
@settings(deadline=None)
def test_the_uses_of_an_example_bound_what_local_training_does(
    num_examples: int, batch_size: int, samples: int | None, epochs: int, steps: int | None, drop_last: bool
) -> None:
    used = min(samples or num_examples, num_examples)
    if batch_size > used:
        return
    local = LocalTraining(epochs=epochs, samples=samples, batch_size=batch_size, steps=steps, drop_last=drop_last)
    _, plan = plan_batches(num_examples, local, rng=replayed(0))
    truth = [sum(example in step.tolist() for step in plan) for example in range(used)]
    assert max(truth) <= uses_of_an_example(len(plan), local.steps_per_epoch(num_examples))
    assert uses_of_an_example(len(plan), None) == len(plan)


def test_without_opacus_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(UsageError, match=r"pip install 'leaktight\[dp\]'"):
        require_opacus()
