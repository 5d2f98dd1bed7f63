"""Labels guessed without the update: what is right by chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from leaktight.audits.blind import BlindLabels, LabelDraws, blind_labels

CLASSES = 10


def draws_of(clients: int = 20, each: int = 3000, classes: int = CLASSES) -> LabelDraws:
    """Clients whose labels are drawn uniformly."""
    generator = torch.Generator().manual_seed(0)
    return LabelDraws.of([torch.randint(classes, (each,), generator=generator) for _ in range(clients)])


def balanced(number: int) -> Tensor:
    return torch.arange(number) % CLASSES


def compared(
    guess: Tensor, truth: Tensor, draws: LabelDraws, sizes: Sequence[int] | None = None, seed: int = 0
) -> BlindLabels:
    return blind_labels(guess, truth, sizes or [len(truth)], draws, np.random.default_rng(seed))


@pytest.mark.parametrize(("number", "expected"), [(64, 0.85), (16, 0.69)])
def test_how_much_of_a_batch_is_right_by_chance(number: int, expected: float) -> None:
    blind = compared(balanced(number), balanced(number), draws_of())
    assert blind.accuracy == pytest.approx(expected, abs=0.015)


def test_84_percent_of_64_labels_are_no_leak_and_all_of_them_are_one() -> None:
    generator = torch.Generator().manual_seed(1)
    truth = torch.randint(CLASSES, (64,), generator=generator)
    draws = draws_of()
    assert compared(balanced(64), truth, draws).chance > 0.05
    assert compared(truth, truth, draws).chance == 1 / 1000


def test_one_label_is_right_as_often_as_it_occurs() -> None:
    blind = compared(torch.tensor([3]), torch.tensor([3]), draws_of())
    assert blind.chance == pytest.approx(0.1, abs=0.03)
    assert blind.accuracy == pytest.approx(0.1, abs=0.03)
    assert compared(torch.tensor([3]), torch.tensor([4]), draws_of()).chance == 1.0


def test_the_chance_of_a_fixed_guess_is_uniform_or_larger() -> None:
    draws, generator = draws_of(each=300), torch.Generator().manual_seed(2)
    chances = []
    for seed in range(60):
        truth = torch.randint(CLASSES, (64,), generator=generator)
        chances.append(compared(balanced(64), truth, draws, seed=seed).chance)
    assert kstest(chances, "uniform", alternative="greater").pvalue > 0.01
    assert np.mean(np.array(chances) <= 0.05) <= 0.1


def test_clients_of_one_class_make_chance_guesses_good() -> None:
    """A label read right four times over is no more than one right guess where every client has one class."""
    draws = LabelDraws.of([torch.full((50,), label) for label in range(4)])
    four = torch.full((4,), 2)
    assert compared(four, four, draws).chance == pytest.approx(0.25, abs=0.05)
    uniform = draws_of(classes=4)
    assert compared(four, four, uniform).chance < 0.02


def test_a_sum_is_of_several_clients_each_with_its_own_size() -> None:
    draws = LabelDraws.of([torch.full((50,), label) for label in range(3)])
    counts = draws.drawn([5, 2, 1], np.random.default_rng(0))
    assert sorted(counts.tolist()) == [1, 2, 5], "no client twice"


def test_a_small_client_repeats_its_labels() -> None:
    draws = LabelDraws.of([torch.tensor([0, 1]), torch.tensor([0] * 30)])
    assert {int(draws.drawn([10], np.random.default_rng(seed)).sum()) for seed in range(20)} == {10}


def test_words_scores_and_unknown_labels() -> None:
    words = torch.tensor([[1, 2, -1], [3, -1, -1], [1, 2, 4]])
    draws = LabelDraws.of([words, words])
    assert draws.counts_of(torch.tensor([[1, 2], [9, 9]])).tolist() == [1, 0, 0], "padding does not count"
    classes = draws_of()
    scores = torch.zeros(2, CLASSES)
    scores[0, 3] = scores[1, 5] = 1.0
    assert torch.equal(
        torch.from_numpy(classes.counts_of(scores)), torch.from_numpy(classes.counts_of(torch.tensor([3, 5])))
    )
    assert classes.counts_of(torch.tensor([77])).sum() == 0
