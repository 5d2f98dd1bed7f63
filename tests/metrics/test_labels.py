"""Label accuracy, success rates and re-identification, in cases small enough to count by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.seeds import replayed
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.metrics import attack_success_rate, label_accuracy, reidentification, reidentification_top_k

labels = st.lists(st.integers(0, 4), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("guess", "truth", "share"),
    [
        ([3, 1, 2], [1, 2, 3], 1.0),
        ([1, 1, 1], [1, 2, 3], 1 / 3),
        ([1, 2, 3], [1, 1, 1], 1 / 3),
        ([4, 5], [1, 2], 0.0),
        ([0, 1, 2, 3, 4], [2], 0.2),
        ([2], [2, 2, 3, 3], 0.25),
        ([], [1], 0.0),
    ],
)
def test_overlap_of_multisets(guess: list[int], truth: list[int], share: float) -> None:
    assert label_accuracy(torch.tensor(guess, dtype=torch.long), torch.tensor(truth)) == pytest.approx(share)


@given(guess=labels, truth=labels, data=st.data())
def test_symmetric_in_range_and_without_order(guess: list[int], truth: list[int], data: st.DataObject) -> None:
    value = label_accuracy(torch.tensor(guess), torch.tensor(truth))
    assert 0 <= value <= 1
    assert value == label_accuracy(torch.tensor(truth), torch.tensor(guess))
    assert value == label_accuracy(torch.tensor(data.draw(st.permutations(guess))), torch.tensor(truth))
    assert (value == 1) == (sorted(guess) == sorted(truth))


def test_scores_of_classes_count_by_their_highest() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3]])
    assert label_accuracy(scores, torch.tensor([0, 1])) == 1
    assert label_accuracy(scores, torch.tensor([2, 1])) == 0.5


def test_words_count_whole() -> None:
    words = torch.tensor([[3, 1, 0], [2, 2, 2]])
    assert label_accuracy(words, torch.tensor([[2, 2, 2], [3, 1, 1]])) == 0.5


@pytest.mark.parametrize("wrong", [torch.zeros(2, 1, 4, 4), torch.tensor([0.5, 1.0])])
def test_other_things_than_labels_are_refused(wrong: Tensor) -> None:
    with pytest.raises(UsageError, match="expected labels"):
        label_accuracy(wrong, torch.tensor([1, 2]))


def test_success_rate_counts_the_threshold_itself_and_no_nan() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, math.nan])
    assert attack_success_rate(scores, 2.0, "high") == 0.5
    assert attack_success_rate(scores, 1.0, "low") == 0.25
    with pytest.raises(UsageError, match="at least one score"):
        attack_success_rate(torch.zeros(0), 1.0, "low")


def test_reidentification_by_hand() -> None:
    gallery = torch.tensor([[0.0], [1.0], [10.0]])
    guess = torch.tensor([[0.2], [0.9], [4.0]])
    where = torch.tensor([0, 0, 2])
    assert reidentification_top_k(guess, gallery, where, 1).tolist() == [1, 0, 0]
    assert reidentification_top_k(guess, gallery, where, 2).tolist() == [1, 1, 0]
    assert reidentification_top_k(guess, gallery, where, 3).tolist() == [1, 1, 1]


def test_features_that_do_not_tell_images_apart_identify_nobody() -> None:
    hits = reidentification_top_k(torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 4]), 4)
    assert hits.tolist() == [0, 0]
    with_nan = reidentification_top_k(torch.full((1, 3), math.nan), torch.eye(3), torch.tensor([0]), 3)
    assert with_nan.tolist() == [0]


@given(seed=st.integers(0, 10**6), k=st.integers(1, 5))
def test_agrees_with_sorting(seed: int, k: int) -> None:
    generator = replayed(seed).public()
    guess, gallery = torch.rand(4, 3, generator=generator), torch.rand(5, 3, generator=generator)
    where = torch.randint(5, (4,), generator=generator)
    hits = reidentification_top_k(guess, gallery, where, k)
    for row in range(4):
        nearest = sorted(range(5), key=lambda place: float((guess[row] - gallery[place]).double().norm()))
        assert bool(hits[row]) == (int(where[row]) in nearest[:k])


def test_reidentification_of_images() -> None:
    gallery = torch.rand(6, 3, 8, 8, generator=replayed(0).public())
    where = torch.tensor([4, 1])
    guess = gallery[where] + 0.01
    assert reidentification(guess, gallery, where, extract=lambda x: x.flatten(1)).tolist() == [1, 1]
    assert reidentification(guess, gallery, where.flip(0), extract=lambda x: x.flatten(1)).tolist() == [0, 0]
    assert reidentification(guess, gallery, where, extract=lambda x: x.mean((1, 2, 3))[:, None] * 0).tolist() == [0, 0]


def test_wrong_places_are_named() -> None:
    with pytest.raises(UsageError, match="size of the gallery, 3"):
        reidentification_top_k(torch.eye(3), torch.eye(3), torch.arange(3), 4)
    with pytest.raises(UsageError, match=r"0\.\.2"):
        reidentification_top_k(torch.eye(3), torch.eye(3), torch.tensor([0, 1, 3]), 1)
    with pytest.raises(UsageError, match="3 guesses and 2 indices"):
        reidentification_top_k(torch.eye(3), torch.eye(3), torch.tensor([0, 1]), 1)
