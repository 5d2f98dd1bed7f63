"""One match per batch: against brute force, with counts that differ, and the same scores in whatever order."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.seeds import replayed
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.protocols import Metric
from leaktight.metrics import METRICS, NO_GUESS, FunctionMetric, align, match, mse, pairwise, score
from leaktight.metrics.match import mse_cost
from leaktight.metrics.spec import Resources


def images(count: int, seed: int) -> Tensor:
    return torch.rand(count, 1, 4, 4, generator=replayed(seed).public())


def named(*names: str) -> list[Metric]:
    return [METRICS[name].build(Resources(root=Path("nowhere"))) for name in names]


def least_total(costs: Tensor) -> float:
    """The least total cost over every way to pair as many as possible."""
    wide = costs if costs.shape[0] <= costs.shape[1] else costs.T
    ways = itertools.permutations(range(wide.shape[1]), wide.shape[0])
    return min(sum(float(wide[row, column]) for row, column in enumerate(way)) for way in ways)


@given(seed=st.integers(0, 10**6), guesses=st.integers(1, 5), truths=st.integers(1, 5))
def test_least_total_cost_of_all_pairings(seed: int, guesses: int, truths: int) -> None:
    guess, truth = images(guesses, seed), images(truths, seed + 1)
    found = match(guess, truth)
    costs = mse_cost(guess, truth)
    pairs = [(int(place), column) for column, place in enumerate(found) if place != NO_GUESS]
    assert len(pairs) == min(guesses, truths)
    assert len({place for place, _ in pairs}) == len(pairs)
    assert sum(float(costs[pair]) for pair in pairs) == pytest.approx(least_total(costs), abs=1e-12)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), data=st.data())
def test_order_of_the_guesses_does_not_matter(seed: int, count: int, data: st.DataObject) -> None:
    guess, truth = images(count, seed), images(count, seed + 1)
    order = torch.tensor(data.draw(st.permutations(range(count))))
    metrics = named("mse", "psnr", "ssim")
    scores, shuffled, other_truths = (
        score(guess, truth, metrics),
        score(guess[order], truth, metrics),
        score(guess, truth[order], metrics),
    )
    for name in scores:
        assert torch.equal(scores[name], shuffled[name])
        assert torch.equal(scores[name][order], other_truths[name])


def test_recovers_a_permutation() -> None:
    truth = images(6, 0)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    noisy = truth[order] + 0.01 * images(6, 1)
    found = match(noisy, truth)
    assert torch.equal(order[found], torch.arange(6))
    assert float(mse(align(noisy, truth, found), truth).max()) < 1e-4


def test_cost_of_pairs_is_the_metric() -> None:
    guess, truth = images(3, 0) * 2 - 0.5, images(4, 1)
    by_metric = pairwise(named("mse")[0])(guess, truth)
    assert torch.allclose(mse_cost(guess, truth), by_metric, atol=1e-12)


def test_a_metric_that_is_high_for_leaks_is_maximised() -> None:
    guess, truth = images(4, 0), images(4, 1)
    found = match(guess, truth, pairwise(named("ssim")[0]))
    costs = pairwise(named("ssim")[0])(guess, truth)
    assert float(costs[found, torch.arange(4)].sum()) == pytest.approx(least_total(costs), abs=1e-12)


def test_matches_once_for_all_metrics() -> None:
    calls = []

    def counting(guess: Tensor, truth: Tensor) -> Tensor:
        calls.append(len(guess))
        return mse_cost(guess, truth)

    seen: list[Tensor] = []

    def remembering(guess: Tensor, truth: Tensor) -> Tensor:
        seen.append(guess)
        return mse(guess, truth)

    metrics = [FunctionMetric(name=name, leaks_when="low", function=remembering) for name in ("one", "two")]
    scores = score(images(3, 0), images(3, 1), metrics, cost=counting)
    assert list(scores) == ["one", "two"]
    assert calls == [3]
    assert torch.equal(seen[0], seen[1])


def test_truths_without_a_guess_are_scored_against_grey() -> None:
    truth = images(3, 0)
    guess = truth[[2]]
    assert match(guess, truth).tolist() == [NO_GUESS, NO_GUESS, 0]
    expected = mse(torch.full_like(truth, 0.5), truth)
    scores = score(guess, truth, named("mse"))["mse"]
    assert scores.tolist() == [float(expected[0]), float(expected[1]), 0]


def test_surplus_guesses_are_dropped() -> None:
    truth = images(2, 0)
    guess = torch.cat([images(3, 1), truth[[1, 0]]])
    assert match(guess, truth).tolist() == [4, 3]


def test_no_guess_at_all() -> None:
    assert match(images(0, 0), images(2, 0)).tolist() == [NO_GUESS, NO_GUESS]
    assert score(images(0, 0), images(2, 0), named("mse"))["mse"].shape == (2,)


def test_a_guess_of_nan_never_displaces_a_good_one() -> None:
    truth = images(3, 0)
    bad = torch.full((1, 1, 4, 4), math.nan)
    assert match(torch.cat([bad, truth]), truth).tolist() == [1, 2, 3]
    scores = score(torch.cat([bad, truth[1:]]), truth, named("mse"))["mse"]
    assert scores.isnan().tolist() == [True, False, False]
    assert match(bad.expand(2, -1, -1, -1), truth[:2]).sort().values.tolist() == [0, 1]


def test_nothing_is_changed_and_values_outside_the_range_are_kept() -> None:
    guess, truth = images(2, 0) * 3 - 1, images(2, 1)
    before = guess.clone(), truth.clone()
    aligned = align(guess, truth, match(guess, truth))
    assert torch.equal(guess, before[0])
    assert torch.equal(truth, before[1])
    assert float(aligned.max()) == float(guess.max())


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(UsageError, match="one image shape"):
        match(torch.zeros(1, 1, 4, 4), torch.zeros(1, 3, 4, 4))
    with pytest.raises(UsageError, match="one per pair"):
        match(images(2, 0), images(3, 0), lambda guess, truth: torch.zeros(3, 2))
