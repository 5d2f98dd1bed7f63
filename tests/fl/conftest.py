"""Small networks and examples for the tests of local training and federations."""

from __future__ import annotations

import pytest
import torch
from tests.seeds import replayed
from torch import nn

from leaktight.core.rng import global_seed
from leaktight.core.types import Batch, Examples


@pytest.fixture
def network() -> nn.Module:
    """A smooth network in float64."""
    with global_seed(replayed(0)):
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Sigmoid(), nn.Linear(6, 3)).double()


@pytest.fixture
def normalised() -> nn.Module:
    """A network with batch normalisation, in float64."""
    with global_seed(replayed(0)):
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double()


@pytest.fixture
def batches() -> list[Batch]:
    generator = replayed(1).public()
    return [
        Batch(
            torch.rand(5, 3, 2, 2, generator=generator, dtype=torch.float64),
            torch.randint(3, (5,), generator=generator),
        )
        for _ in range(4)
    ]


@pytest.fixture
def examples() -> Examples:
    generator = replayed(2).public()
    return Examples(
        torch.randint(256, (40, 3, 2, 2), generator=generator, dtype=torch.uint8),
        torch.randint(3, (40,), generator=generator),
    )
