"""The functions behind tables that neither an audit nor a training makes."""

from __future__ import annotations

import pytest
import torch
from tests.seeds import replayed

from leaktight.core.protocols import ClientFacts, RoundPlan
from leaktight.data.embedded import Digits
from leaktight.fl.local import silent
from leaktight.models.gan import OwnGenerator
from leaktight.reproductions.tables.agic import matched
from leaktight.reproductions.tables.lrp import FEW, MANY, _OwnRates, inverted, two_holdings


def test_two_clients_share_no_label_and_hold_equally_many(tmp_path) -> None:  # type: ignore[no-untyped-def]
    data = Digits(size=8).load(tmp_path)
    first, second = two_holdings(data, 20, replayed(0)).clients.values()
    labels = [sorted(data.train.targets[each.train].unique().tolist()) for each in (first, second)]
    assert labels == [list(FEW), list(MANY)]
    assert len(first.train) == len(second.train) == 160


@pytest.mark.parametrize(("spread", "least", "most"), [(0.0, 0.02, 0.02), (1.0, 0.0, 0.04)])
def test_every_client_has_its_own_rates(spread: float, least: float, most: float) -> None:
    defense = _OwnRates(rates=(0.005, 0.02), spread=spread)
    _, state = defense.start(torch.nn.Identity(), ClientFacts("client-001", 160, 8), rng=replayed(0))
    plan, _ = defense.on_round(RoundPlan(0, (1.0,) * 200), state, rng=replayed(1), report=silent)
    assert least <= min(plan.learning_rates) <= max(plan.learning_rates) <= most
    assert sum(plan.learning_rates) / 200 == pytest.approx(0.02, rel=0.15)


def test_gan_inversion_finds_the_latent_of_an_image() -> None:
    source = OwnGenerator(target="leaktight.reproductions.tables.lrp:untrained_generator", latent=4)
    generator = source.read()
    truth = generator.sample(torch.tensor([[0.5, -0.3, 0.8, 0.1]]))
    found = inverted(generator, truth, None, torch.tanh, replayed(0))
    assert float((generator.sample(found.tanh()) - truth).square().mean()) < 1e-4


def test_updates_of_images_with_labels_of_their_own_are_matched_by_labels() -> None:
    """Without a search to speak of, only labels tell; with one image for each label they tell everything."""
    values = matched(
        [
            "data={kind='digits', size=8, split_seed=2}",
            "model={kind='lenet_zhu', activation='relu'}",
            "audit.trials=3",
            "attack.pre_iterations=1",
            "attack.backend=eager",
            "seed=1",
        ]
    )
    assert set(values) == {"neither", "labels", "pooling", "labels and pooling"}
    assert list(values["labels"]["batch size 1"].values()) == [1.0, 1.0, 1.0]
