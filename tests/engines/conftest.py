"""A federation small enough to run in a moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.seeds import replayed
from torch import nn

from leaktight.core.protocols import Aggregator, Defense
from leaktight.core.rng import Rng, global_seed
from leaktight.core.training import LocalTraining
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Iid
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.federation import Federation, assemble
from leaktight.fl.plan import FederationPlan

MakeFederation = Callable[..., Federation]


def separable_examples(count: int, rng: Rng) -> Examples:
    """Three classes that a small network tells apart: one bright channel each."""
    generator = rng.public()
    targets = torch.randint(3, (count,), generator=generator)
    images = torch.randint(120, (count, 3, 4, 4), generator=generator, dtype=torch.uint8)
    images[torch.arange(count), targets] += 100
    return Examples(images, targets)


@pytest.fixture
def make_federation() -> MakeFederation:
    def make(
        local: LocalTraining | None = None,
        aggregator: Aggregator | None = None,
        plan: FederationPlan | None = None,
        defense: Defense | None = None,
        clients: int = 5,
        dropout: float = 0.1,
    ) -> Federation:
        dataset = Dataset(
            "separable",
            separable_examples(120, replayed(1)),
            separable_examples(1500, replayed(2)),
            ("red", "green", "blue"),
        )
        with global_seed(replayed(3)):
            model = nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, 3)
            )
        return assemble(
            dataset,
            Iid(clients=clients).split(dataset, rng=replayed(0)),
            model,
            local=local or LocalTraining(epochs=2, batch_size=8, learning_rate=0.1, momentum=0.5),
            aggregator=aggregator or FedAvg(),
            plan=plan or FederationPlan(rounds=3, per_round=3),
            defense=defense or Defense(),
            rng=replayed(4),
        )

    return make
