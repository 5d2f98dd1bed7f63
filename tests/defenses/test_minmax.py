from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from tests.defenses.steps import defended_update, drawn_step, flat
from tests.seeds import replayed

from leaktight.defenses.minmax import MinMaxSampling, sample


def updates(defense: MinMaxSampling, gradient: torch.Tensor, draws: int) -> torch.Tensor:
    """What is sent in many independent draws, (draws, n)."""
    return torch.stack([defended_update(defense, {"w": gradient}, seed=seed).tensors["w"] for seed in range(draws)])


@pytest.mark.parametrize(("keep_share", "count"), [(0.05, 50), (0.0501, 51), (0.0001, 1), (0.5, 500)])
def test_exactly_the_share_is_kept_and_exact(keep_share: float, count: int) -> None:
    gradient = drawn_step((20, 40), (200,)).gradient
    outcome = defended_update(MinMaxSampling(keep_share=keep_share, unbiased=False), gradient)
    kept = flat(outcome.tensors) != 0
    assert int(kept.sum()) == count
    assert torch.equal(flat(outcome.tensors)[kept], flat(gradient)[kept])
    assert outcome.figures["fraction_kept"] == pytest.approx(count / 1000)
    assert not bool(torch.signbit(flat(outcome.tensors)[~kept]).any())


def test_the_weights_exceed_a_threshold_with_the_stated_probability() -> None:
    """P((1/u - 1) g^2 > C) = g^2 / (g^2 + C), by counting, with C where the other entries put it."""
    gradient = torch.tensor([0.5, 1.0, 2.0, 3.0] + [1.0] * 400, dtype=torch.float64)
    draws = 1500
    hits, expected = torch.zeros(4), torch.zeros(4)
    for seed in range(draws):
        kept, threshold = sample(gradient, 60, replayed(seed).secret())
        hits += torch.isin(torch.arange(4), kept).float()
        expected += (gradient[:4] ** 2 / (gradient[:4] ** 2 + threshold)).float()
    deviation = (hits - expected) / (expected * (1 - expected / draws)).sqrt()
    assert float(deviation.abs().max()) < 4.5


def test_values_over_their_probability_are_unbiased() -> None:
    gradient = torch.tensor([0.3, -0.6, 1.0, -2.0, 4.0] + [0.5, -0.5] * 30, dtype=torch.float64)
    sent = updates(MinMaxSampling(keep_share=0.3), gradient, 1000)
    error = (sent.mean(0) - gradient) / (sent.std(0) / math.sqrt(len(sent)))
    assert stats.kstest(error.numpy(), "norm").pvalue > 1e-3
    biased = updates(MinMaxSampling(keep_share=0.3, unbiased=False), gradient, 300)
    assert float(biased.mean(0)[0]) < 0.2, "without the division small entries are lost"


def test_a_sent_value_is_the_entry_over_its_probability() -> None:
    gradient = drawn_step((300,)).gradient
    outcome = defended_update(MinMaxSampling(), gradient)
    kept, before = outcome.tensors["0"][outcome.tensors["0"] != 0], gradient["0"][outcome.tensors["0"] != 0]
    probability = before**2 / (before**2 + outcome.figures["threshold"])
    torch.testing.assert_close(kept, before / probability)


def test_zeros_are_never_divided_by() -> None:
    gradient = {"w": torch.tensor([0.0] * 95 + [1.0] * 5)}
    outcome = defended_update(MinMaxSampling(keep_share=0.2), gradient)
    assert torch.equal(outcome.tensors["w"], gradient["w"]), "fewer than k entries are not zero: all are kept, C = 0"


def test_keeping_everything_is_the_identity() -> None:
    gradient = drawn_step((4, 5)).gradient
    assert defended_update(MinMaxSampling(keep_share=1), gradient).tensors["0"] is gradient["0"]


@pytest.mark.parametrize("keep_share", [0, -0.1, 1.1, math.nan])
def test_impossible_shares_are_refused(keep_share: float) -> None:
    with pytest.raises(ValueError, match=r"expected keep_share in \(0, 1\]"):
        MinMaxSampling(keep_share=keep_share)
