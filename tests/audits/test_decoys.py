"""The place of a victim among decoys: uniform for a blind guess, the first for a perfect one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import Tensor

from leaktight.audits.decoys import MOST_DECOYS, DecoyPool, Identified, identify
from leaktight.core.types import Batch, Examples
from leaktight.metrics import align, match, psnr, ssim

CLASSES = 3
SIZE = 8


def made_up(number: int, seed: int = 0) -> Examples:
    """Images of three classes, each a pattern with noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(CLASSES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(99))
    targets = torch.randint(CLASSES, (number,), generator=generator)
    noise = 0.2 * torch.randn(number, 1, SIZE, SIZE, generator=generator)
    return Examples(((patterns[targets] + noise).clamp(0, 1) * 255).byte(), targets)


PUBLIC = made_up(200, seed=5)
TRAIN = made_up(1200, seed=6)
POOL = DecoyPool(TRAIN, classed=True)


def class_mean(labels: Tensor, generator: torch.Generator) -> Tensor:
    public = PUBLIC.batch()
    return torch.stack([public.inputs[public.targets == label].mean(0) for label in labels])


def of_the_class(labels: Tensor, generator: torch.Generator) -> Tensor:
    public = PUBLIC.batch()
    own = [public.inputs[public.targets == label] for label in labels]
    return torch.stack([each[int(torch.randint(len(each), (), generator=generator))] for each in own])


def noise(labels: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(len(labels), 1, SIZE, SIZE, generator=generator)


def identified(number: int, seed: int, blind: Callable[[Tensor, torch.Generator], Tensor]) -> Identified:
    generator = torch.Generator().manual_seed(seed)
    truth = TRAIN.batch(torch.randperm(len(TRAIN), generator=generator)[:number])
    decoys = POOL.draw(truth, truth.inputs, np.random.default_rng(seed))
    assert decoys is not None
    return identify(blind(truth.targets, generator), truth.inputs, decoys)


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("blind", [class_mean, of_the_class, noise])
def test_the_place_of_a_blind_guess_is_uniform(number: int, blind: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    ranks = [identified(number, seed, blind).rank for seed in range(200)]
    assert {rank.decoys for rank in ranks} <= set(range(30, MOST_DECOYS + 1))
    chances = np.array([rank.chance for rank in ranks])
    assert kstest(chances, "uniform").pvalue > 0.005
    assert chisquare(np.histogram(chances, bins=10, range=(0, 1.0001))[0]).pvalue > 0.005
    assert (chances <= 0.05).mean() < 0.09


@pytest.mark.parametrize("number", [1, 4])
def test_a_perfect_guess_is_first_in_any_order(number: int) -> None:
    truth = TRAIN.batch(slice(0, number))
    decoys = POOL.draw(truth, truth.inputs, np.random.default_rng(0))
    assert decoys is not None
    found = identify(truth.inputs.flip(0), truth.inputs, decoys)
    assert found.rank.place == 1
    assert all((score or 0.0) < 40 for score in found.decoy_scores["psnr"])


def test_a_guess_that_is_not_finite_or_missing_is_last() -> None:
    truth = TRAIN.batch(slice(0, 2))
    decoys = POOL.draw(truth, truth.inputs, np.random.default_rng(0))
    assert decoys is not None
    broken = identify(torch.full_like(truth.inputs, torch.nan), truth.inputs, decoys)
    assert broken.rank.place == broken.rank.decoys + 1, "equal scores count against the guess"
    assert broken.decoy_scores == {"psnr": (None, None), "ssim": (None, None)}
    none = identify(truth.inputs[:0], truth.inputs, decoys)
    assert none.rank.place > 1
    half = identify(truth.inputs[:1], truth.inputs, decoys)
    assert half.rank.place == 1, "one of two examples was found"


@pytest.mark.parametrize("number", [1, 5])
def test_scores_are_those_of_the_metrics(number: int) -> None:
    generator = torch.Generator().manual_seed(3)
    truth = TRAIN.batch(slice(10, 10 + number))
    guess = (truth.inputs + 0.3 * torch.randn(truth.inputs.shape, generator=generator)).flip(0)
    decoys = POOL.draw(truth, truth.inputs, np.random.default_rng(1))
    assert decoys is not None
    found = identify(guess, truth.inputs, decoys)
    own = align(guess, truth.inputs, match(guess, truth.inputs))
    batches = decoys.batch().inputs.split(number)
    for name, metric in (("psnr", psnr), ("ssim", ssim)):
        best = torch.stack([metric(own, batch) for batch in batches]).amax(0)
        assert found.decoy_scores[name] == pytest.approx(best.tolist(), abs=1e-4)
    anew = [align(guess, batch, match(guess, batch)) for batch in (truth.inputs, *batches)]
    scores = np.array(
        [
            [fold(metric(each, batch)).item() for metric in (psnr, ssim) for fold in (torch.mean, torch.max)]
            for each, batch in zip(anew, (truth.inputs, *batches), strict=True)
        ]
    )
    ranks = 1 + (scores[None] > scores[:, None]).sum(1)
    sums = ranks.sum(1)
    assert found.rank.place == 1 + int((sums[1:] <= sums[0]).sum())


def test_decoys_have_the_labels_of_the_victim_and_none_is_behind_the_update_or_used_twice() -> None:
    truth = TRAIN.batch(slice(0, 6))
    behind = TRAIN.batch(slice(0, 40)).inputs
    decoys = POOL.draw(truth, behind, np.random.default_rng(0))
    assert decoys is not None
    count = len(decoys) // 6
    assert decoys.targets.tolist() == truth.targets.tolist() * count
    drawn = {image.tobytes() for image in decoys.inputs.numpy()}
    assert len(drawn) == len(decoys)
    assert not drawn & {image.tobytes() for image in TRAIN.inputs[:40].numpy()}
    again = POOL.draw(truth, behind, np.random.default_rng(0))
    assert again is not None
    assert torch.equal(again.inputs, decoys.inputs)


def test_there_are_as_many_decoys_as_the_data_allow() -> None:
    few = Examples(TRAIN.inputs[:10], torch.tensor([0] * 7 + [1] * 3))
    truth = few.batch(torch.tensor([0, 1, 9]))
    decoys = DecoyPool(few, classed=True).draw(truth, truth.inputs, np.random.default_rng(0))
    assert decoys is not None
    assert len(decoys) // 3 == 2, "five images left of the first class, two in each batch"
    alone = few.batch(torch.arange(7, 10))
    assert DecoyPool(few, classed=True).draw(alone, alone.inputs, np.random.default_rng(0)) is None


def test_without_classes_any_example_is_a_decoy() -> None:
    words = Examples(TRAIN.inputs[:50], torch.arange(100).reshape(50, 2))
    truth = Batch(words.batch(slice(0, 2)).inputs, words.targets[:2])
    decoys = DecoyPool(words, classed=False).draw(truth, truth.inputs, np.random.default_rng(0))
    assert decoys is not None
    assert len(decoys) // 2 == 24
