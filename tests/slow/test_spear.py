"""SPEAR at full size: CIFAR-10 batches of 8 and 16 through a layer of 400 units, and a table."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_breast_cancer
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import nn

from leaktight.attacks.exact.spear import Spear
from leaktight.config.catalogue import DATASETS
from leaktight.core.errors import DataError
from leaktight.core.rng import global_seed
from leaktight.core.types import Batch
from leaktight.data.dataset import Dataset, data_root
from leaktight.metrics.match import match
from leaktight.models.initialise import build_model
from leaktight.models.small import Mlp

pytestmark = pytest.mark.slow


def exact(model: nn.Module, batch: Batch, classes: int) -> bool:
    """Whether every example is over 60 dB. A certificate that says otherwise is an error."""
    found = Spear().reconstruct([observe(model, batch, classes)], rng=replayed(0))
    order = match(found.guess.inputs, batch.inputs)
    errors = (found.guess.inputs[order] - batch.inputs).square().flatten(1).mean(1)
    right = bool((errors < 1e-6).all()) and len(found.guess) == len(batch)
    assert found.certificate is not None
    assert right or not found.certificate.holds
    return right


@pytest.mark.parametrize(("count", "least"), [(8, 8), (16, 5)])
def test_cifar_batches_are_exact(count: int, least: int) -> None:
    try:
        data: Dataset = DATASETS["cifar10"]().load(data_root(None))
    except DataError as error:
        pytest.skip(str(error))
    found = 0
    for seed in range(10):
        model = build_model(Mlp(hidden=(400, 400)), data.inputs, 10, rng=replayed(seed))
        found += exact(model, draw(data, count, seed=seed), 10)
    assert found >= least


def test_rows_of_a_table_are_exact() -> None:
    table = load_breast_cancer()
    rows = torch.tensor(table.data, dtype=torch.float32)
    low, high = rows.amin(0), rows.amax(0)
    rows = ((rows - low) / (high - low)).reshape(-1, 1, 1, 30)
    found = 0
    for seed in range(10):
        with global_seed(replayed(seed)):
            sizes = (nn.Linear(30, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 2))
            chosen = torch.randperm(len(rows))[:8]
        found += exact(nn.Sequential(nn.Flatten(), *sizes), Batch(rows[chosen], torch.tensor(table.target)[chosen]), 2)
    assert found >= 8
