"""What a task says about its outputs and targets."""

from __future__ import annotations

import torch
from tests.seeds import replayed

from leaktight.core.tasks import Classification, WordRecognition


def test_outputs_that_a_task_expects() -> None:
    assert Classification().output_shape((2, 7), 10) == (2, 10)
    assert Classification().output_shape((2, 7, 7), 10) == (2, 10)
    assert WordRecognition(blank=36).output_shape((2, 24, 5), 36) == (2, 24, 37)
    assert WordRecognition(blank=36).output_shape((2, 37), 36) == (2, 1, 37)


def test_faults_of_targets_are_named() -> None:
    task = Classification()
    assert task.fault(torch.tensor([0, 9]), 10) is None
    assert task.fault(torch.tensor([0, 10]), 10) == "labels in 0..9, got 0..10"
    assert "one class" in str(task.fault(torch.zeros(2, 3), 10))


def test_words_of_several_data_sets_get_one_width() -> None:
    joined = WordRecognition().join([torch.tensor([[1, 2, 3]]), torch.tensor([[4]])])
    assert joined.tolist() == [[1, 2, 3], [4, -1, -1]]


def test_blind_targets() -> None:
    labels = Classification().blind_targets(50, 3, replayed(0).public())
    assert set(labels.tolist()) == {0, 1, 2}
    assert WordRecognition().blind_targets(2, 36, replayed(0).public()).tolist() == [[-1], [-1]]
