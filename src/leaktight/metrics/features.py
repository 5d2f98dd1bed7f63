"""The distance of a guess from the truth in the features of a network."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.protocols import Metric
from leaktight.core.text import sides
from leaktight.metrics.image import image_pair
from leaktight.metrics.spec import Extract, LeaksWhen


def feature_mse(guess_features: Tensor, truth_features: Tensor) -> Tensor:
    """The mean squared error of features (N, ...) to (N,).

    >>> feature_mse(torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 0.0]])).tolist()
    [2.0]
    """
    if guess_features.shape != truth_features.shape or guess_features.ndim < 2:
        raise UsageError(
            "expected features (N, ...) of the same shape twice, "
            f"got {sides(guess_features.shape)} and {sides(truth_features.shape)}"
        )
    gap = guess_features.detach().cpu().double() - truth_features.detach().cpu().double()
    return gap.square().flatten(1).mean(1)


@dataclass(frozen=True, kw_only=True)
class FeatureMse(Metric):
    """MSE-R: the MSE of representations, by convention the input of the model's final linear layer.

    extract: images in [0, 1] to features, with the model in evaluation mode. Images are clamped to [0, 1] first. Scores
    are comparable only with the same extractor.

    Reference: Li et al., Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage, CVPR 2022.
    """

    extract: Extract
    name: str = field(default="mse_r", init=False)
    leaks_when: LeaksWhen = field(default="low", init=False)

    @torch.no_grad()
    def __call__(self, guess: Tensor, truth: Tensor) -> Tensor:
        clamped = (images.to(guess.device, torch.float32) for images in image_pair(guess, truth))
        return feature_mse(*(self.extract(images) for images in clamped))
