from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.seeds import replayed

from leaktight.data.gaussians import REACH, TwoGaussians, coordinates
from leaktight.data.partition import BySource

NOWHERE = Path("/nowhere/at/all")
STEP = 2 * REACH / 255


def test_two_sets_of_two_classes_in_nine_to_one() -> None:
    data = TwoGaussians(examples=2000).load(NOWHERE)
    assert (len(data.train), len(data.test)) == (3600, 400)
    assert data.inputs.shape == (1, 1, 2)
    clients = BySource(validation=0.1).split(data, rng=replayed(0)).clients
    assert list(clients) == ["client-000-lower", "client-001-upper"]
    for holding in clients.values():
        assert torch.bincount(data.train.targets[holding.train]).tolist() == pytest.approx([810, 810], abs=40)


@pytest.mark.parametrize("opposed", [False, True])
def test_points_lie_where_the_sets_are(opposed: bool) -> None:
    data = TwoGaussians(examples=8000, opposed=opposed).load(NOWHERE)
    assert data.groups is not None
    points = coordinates(data.train.inputs)
    centres = {(0, 0): (-2.0, -1.0), (0, 1): (1.0, -2.0), (1, int(opposed)): (-1.0, 2.5), (1, 1 - opposed): (2.0, 2.0)}
    for (group, label), centre in centres.items():
        own = points[(data.groups == group) & (data.train.targets == label)]
        assert own.mean(0).tolist() == pytest.approx(centre, abs=0.1)
        assert own.std(0).tolist() == pytest.approx([(0.8, 1.2)[group]] * 2, abs=0.05)


def test_the_seed_chooses_the_points() -> None:
    first, again, other = (TwoGaussians(examples=40, draw_seed=seed).load(NOWHERE) for seed in (0, 0, 1))
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert not torch.equal(first.train.inputs, other.train.inputs)


def test_bytes_are_coordinates() -> None:
    ends = torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
    assert coordinates(ends).tolist() == [pytest.approx([-REACH, REACH])]
    data = TwoGaussians(examples=100).load(NOWHERE)
    assert float(data.train.batch().inputs.max()) <= 1
    assert float(coordinates(data.train.inputs).abs().max()) < REACH - STEP
