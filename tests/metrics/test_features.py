"""MSE in a feature space."""

from __future__ import annotations

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.metrics import FeatureMse, feature_mse, mse


def test_by_hand() -> None:
    guess = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    truth = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    assert feature_mse(guess, truth).tolist() == [2.5, 0.5]
    assert feature_mse(guess.view(2, 1, 2), truth.view(2, 1, 2)).tolist() == [2.5, 0.5]


def test_with_the_pixels_as_features_it_is_the_mse_of_clamped_images() -> None:
    generator = replayed(0).public()
    guess, truth = 3 * torch.rand(2, 3, 4, 4, generator=generator) - 1, torch.rand(2, 3, 4, 4, generator=generator)
    assert torch.allclose(FeatureMse(extract=lambda x: x.flatten(1))(guess, truth), mse(guess, truth))


def test_carries_no_gradient_and_changes_nothing() -> None:
    weight = torch.ones(16, 3, requires_grad=True)
    guess = torch.rand(2, 1, 4, 4, generator=replayed(0).public()).requires_grad_()
    before = guess.detach().clone()
    scores = FeatureMse(extract=lambda x: x.flatten(1) @ weight)(guess, torch.zeros(2, 1, 4, 4))
    assert not scores.requires_grad
    assert torch.equal(guess.detach(), before)
    assert scores.tolist() == pytest.approx(before.flatten(1).sum(1).square().tolist(), rel=1e-5)


@pytest.mark.parametrize(("guess", "truth"), [(torch.zeros(2, 3), torch.zeros(2, 4)), (torch.zeros(3), torch.zeros(3))])
def test_wrong_features_are_named(guess: Tensor, truth: Tensor) -> None:
    with pytest.raises(UsageError, match="expected features"):
        feature_mse(guess, truth)
