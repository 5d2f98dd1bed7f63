"""What flows back to units, which examples are alone there, and which round numbers are believed."""

from __future__ import annotations

import pytest
import torch
from tests.seeds import replayed
from torch import nn

from leaktight.core.inputs import Images
from leaktight.core.tasks import Classification
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch
from leaktight.fl.local import Trainer, per_example_gradients
from leaktight.guard import rounds
from leaktight.guard.signals import Signal, made_up, signals
from leaktight.guard.yields import given_away, hushed, rarity


def small() -> tuple[nn.Module, Batch]:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 16), nn.ReLU(), nn.Linear(16, 3))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=replayed(1).public())
    return net, Batch(torch.rand(6, 1, 8, 8, generator=replayed(2).public()), torch.arange(6) % 3)


def test_signals_are_the_gradients_of_each_examples_bias() -> None:
    """Summed over places, what flows back to a unit is the gradient of its bias, example by example."""
    net, batch = small()
    found = signals(net, parameters_of(net), buffers_of(net), batch, task=Classification(), mode="train")
    each = per_example_gradients(Trainer(net, LocalTraining()), parameters_of(net), {}, batch)
    assert [layer.name for layer in found] == ["0", "3", "5"]
    for layer in found:
        torch.testing.assert_close(layer.back.sum(2), each[f"{layer.name}.bias"], rtol=1e-4, atol=1e-6)
        assert layer.rows.shape[0] == layer.back.shape[1]


def signal(back: list[list[float]], rows: torch.Tensor | None = None, name: str = "layer") -> Signal:
    values = torch.tensor(back)
    return Signal(name, values[:, :, None], torch.eye(values.shape[1]) if rows is None else rows)


def test_an_example_alone_in_a_unit_or_in_a_pair_of_like_units_is_given_away() -> None:
    head = signal([[1.0, -1.0]] * 3)
    assert given_away([signal([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]), head]).tolist() == [False, False, False]
    assert given_away([signal([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), head]).tolist() == [True, False, False]
    ladder = [[2.0, 4.0], [3.0, 6.0], [5.0, 0.0]]  # the second unit is the first, twice, without the last example
    assert given_away([signal(ladder), head]).tolist() == [False, False, False]
    like = torch.ones(2, 2)
    assert given_away([signal(ladder, like), head]).tolist() == [False, False, True]


def test_rare_and_quiet_units_are_told_from_usual_ones() -> None:
    head = signal([[1.0, -1.0]] * 16)
    usual = signal([[1.0] * 40] * 16)
    seldom = signal([[float(unit % 16 == place) for unit in range(40)] for place in range(16)])
    assert max(rarity([usual, head], [usual, head])) == pytest.approx(0.0)
    rare, quiet = rarity([seldom, head], [usual, head])
    assert rare == pytest.approx(1.0)
    assert quiet == pytest.approx(1 - 1 / 16)


def test_a_last_layer_that_passes_few_errors_on_is_noticed() -> None:
    honest = torch.eye(4)
    mirrored = torch.ones(4, 4)
    mirrored[1] = -1
    errors = [[1.0, 0.0, -1.0, 0.0], [0.0, 0.0, 1.0, -1.0], [-0.5, 0.0, 1.0, -0.5]]
    assert hushed(signal(errors, honest)) == 0
    assert hushed(signal(errors, mirrored)) == 1


def test_made_up_images_differ_and_are_images() -> None:
    images = made_up(Images(3, 9, 12), 16, replayed(0).public())
    assert images.shape == (16, 3, 9, 12)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert float(images.flatten(1).mean(1).std()) > 0.1


@pytest.mark.parametrize(
    ("number", "last", "seen", "share", "believed"),
    [
        (0, -1, 0, 1.0, True),
        (10, -1, 0, 1.0, True),
        (500, -1, 0, 1.0, False),
        (500, -1, 0, 0.02, True),
        (5, 4, 5, 1.0, True),
        (4, 4, 5, 1.0, False),
        (3, 4, 5, 0.5, False),
        (-1, -1, 0, 1.0, False),
        (True, -1, 0, 1.0, False),
        (10**9, 4, 5, 0.5, False),
    ],
)
def test_round_numbers_are_believed_by_ones_own_rounds(
    number: int, last: int, seen: int, share: float, believed: bool
) -> None:
    assert (rounds.fault(number, last, seen, share) is None) == believed


def test_rounds_that_passed_are_bounded_by_the_plan() -> None:
    assert rounds.elapsed(10, 2, 1.0) == 1
    assert rounds.elapsed(10, 2, 0.5) == 8
    assert rounds.elapsed(1000, 2, 0.5) == 20
