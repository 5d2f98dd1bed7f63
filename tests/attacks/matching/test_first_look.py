"""The loss of orders where a search would start, eager and traced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed

from leaktight.attacks.matching import first_look
from leaktight.attacks.matching.first_look import FirstLook
from leaktight.attacks.optimizers.compile import Backend
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.core.training import LocalTraining
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.models.initialise import build_model
from leaktight.models.small import LeNetZhu


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Digits().load(tmp_path_factory.mktemp("data"))


def look(digits: Dataset, epochs: int, backend: Backend) -> FirstLook:
    local = LocalTraining(epochs=epochs, batch_size=1, learning_rate=0.05)
    batch = draw(digits, 3, 0, unique=True)
    seen = observe(build_model(LeNetZhu(), digits.inputs, 10, rng=replayed(0)), batch, 10, local=local)
    seen = replace(seen, labels=batch.targets.sort().values)
    attack = replace(CsDlg(iterations=3).matching(), backend=backend)
    return FirstLook(attack.problem(attack.evidence([seen], rng=replayed(1)), replayed(1), range(2), together=False))


def test_a_traced_look_sees_what_an_eager_one_sees(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_look, "_WORTH_TRACING", 1)
    orders = [((0, 1, 2),), ((2, 0, 1),), ((1, 2, 0),), ((0, 1, 2),)]
    eager, traced = look(digits, 1, "eager"), look(digits, 1, "fx")
    expected = [eager(order, 2) for order in orders]
    found = [traced(order, 2) for order in orders]
    assert eager.traced is None
    assert traced.traced is not None
    assert found == pytest.approx(expected, rel=1e-10)
    assert len({round(loss, 12) for loss in expected}) == 3


def test_orders_of_several_epochs_are_not_traced(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a graph of its own: the second epoch's batches are fixed in it."""
    monkeypatch.setattr(first_look, "_WORTH_TRACING", 0)
    own = look(digits, 2, "fx")
    same, other = own(((0, 1, 2), (0, 1, 2)), 2), own(((0, 1, 2), (2, 1, 0)), 2)
    assert own.traced is None
    assert torch.tensor([same, other]).isfinite().all()
    assert same != other
