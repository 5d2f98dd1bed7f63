"""Tail matching: the images that dominate an update, from the end of the network to its beginning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.attacks.scenes import observe
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.attacks.exact.analytic import gradient_of
from leaktight.attacks.exact.graph import Graph
from leaktight.attacks.matching.soft import soft_relu
from leaktight.attacks.tails.regression import Sketch, estimate
from leaktight.attacks.tails.tail import Tail
from leaktight.attacks.tails.tail_matching import Dominating, TailMatching
from leaktight.core.errors import ModelError, NotDisclosedError, UsageError
from leaktight.core.rng import global_seed
from leaktight.core.types import Batch, Observation
from leaktight.data.embedded import Digits

PUBLIC = 200


class Chain(nn.Module):
    """Two blocks of convolutions, the last one wide, with a batch norm if wanted."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16) if norm else nn.Identity()
        self.second = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.third = nn.Conv2d(24, 32, 3, padding=1)
        self.last = nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.second(F.relu(self.norm(self.first(inputs)))))
        outputs: Tensor = self.last(F.relu(self.third(hidden)).mean((2, 3)))
        return outputs


def chain(norm: bool = False) -> nn.Module:
    with global_seed(replayed(1)):
        return Chain(norm)


def leaking(**last: object) -> nn.Module:
    """Two convolutions, the first with an activation in place. last: settings of the second."""
    with global_seed(replayed(1)):
        model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.LeakyReLU(0.1, inplace=True))
        model.append(nn.Conv2d(16, 32, 3, **{"padding": 1, **last}))  # type: ignore[arg-type]
        for layer in (nn.LeakyReLU(0.1, inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()):
            model.append(layer)
        model.add_module("last", nn.Linear(32, 10))
        return model


def scene(number: int = 1, norm: bool = False) -> tuple[Observation, Batch]:
    digits = Digits(size=8).load(Path()).train
    batch = digits.batch(slice(PUBLIC, PUBLIC + number))
    seen = observe(chain(norm), batch, 10, mode="eval")
    return replace(seen, public_data=digits.batch(slice(0, PUBLIC))), batch


def entered(seen: Observation, tail: Tail, images: Tensor) -> Tensor:
    return tail.graph.run(images).of[tail.cut].detach()


def similar(one: Tensor, other: Tensor) -> float:
    return float(F.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0))


def test_a_guess_is_nearer_to_its_image_than_to_any_public_one() -> None:
    seen, batch = scene()
    found = TailMatching(iterations=150, starts=1).reconstruct([seen], rng=replayed(1))
    public = seen.public_data
    assert public is not None
    error = (found.guess.inputs - batch.inputs).square().mean()
    assert error < 0.02
    assert error < (found.guess.inputs - public.inputs).square().mean((1, 2, 3)).min()
    assert found.guess.targets.tolist() == batch.targets.tolist()
    assert found.first_loss is not None
    assert found.loss < found.first_loss


def test_a_search_that_does_not_move_is_one_whose_loss_did_not_fall() -> None:
    """What a loss falls from is the same problem, with ReLUs as cold as at the end."""
    seen, _ = scene()
    still, moved = (
        TailMatching(iterations=100, starts=1, learning_rate=rate).reconstruct([seen], rng=replayed(1))
        for rate in (1e-12, 0.05)
    )
    assert still.first_loss is not None
    assert moved.first_loss is not None
    assert still.loss > 0.99 * still.first_loss
    assert moved.loss < 0.95 * moved.first_loss


def test_two_examples_that_share_the_gradient_are_both_found() -> None:
    seen, batch = scene(2)
    found = TailMatching(iterations=300, starts=1).reconstruct([seen], rng=replayed(1))
    assert found.guess.targets.sort().values.tolist() == batch.targets.sort().values.tolist()
    errors = (found.guess.inputs[:, None] - batch.inputs).square().mean((2, 3, 4))
    mean = (batch.inputs.mean(0) - batch.inputs).square().mean()
    assert errors.min(0).values.max() < mean
    assert sorted(errors.argmin(0).tolist()) == [0, 1]


def test_tails_are_the_shortest_first_and_compute_what_the_network_does() -> None:
    seen, batch = scene()
    graph = Graph(seen)
    tails = Tail.all(graph, seen.update.tensors)
    assert [tail.names for tail in tails] == [["third.weight"], ["second.weight", "third.weight"]]
    for tail in tails:
        value = entered(seen, tail, batch.inputs).float()
        expected = graph.run(batch.inputs).of[tail.features]
        assert torch.allclose(tail.module(tail.features)(value)[0].double(), expected, atol=1e-5)
        soft = tail.softened(tail.features)(value, torch.tensor(1e-6))[0]
        assert torch.allclose(soft.double(), expected, atol=1e-4)


def test_a_soft_relu_is_smooth_and_becomes_a_relu() -> None:
    values = torch.linspace(-3, 3, 13)
    assert torch.allclose(soft_relu(values, torch.tensor(1e-4)), values.relu(), atol=1e-4)
    assert (soft_relu(values, torch.tensor(1.0)) > values.relu()).all()


@pytest.mark.parametrize("shape", [(30, 5), (6, 40)])
def test_the_regression_is_ridge_regression(shape: tuple[int, int]) -> None:
    generator = replayed(2).public()
    rows, goals = torch.randn(shape, generator=generator), torch.randn(shape[0], 2, 3, generator=generator)
    query, weight = torch.randn(shape[1], generator=generator), 0.7
    centred, mean = rows - rows.mean(0), goals.mean(0)
    products = centred.T @ centred
    penalty = weight * products.diagonal().mean() * torch.eye(shape[1])
    factors = torch.linalg.solve(products + penalty, centred.T @ (goals - mean).flatten(1))
    expected = mean + ((query - rows.mean(0)) @ factors).reshape(mean.shape)
    assert torch.allclose(estimate(rows, goals, query, weight), expected, atol=1e-4)


@pytest.mark.parametrize(("number", "leaky"), [(1, False), (2, False), (1, True)])
def test_rows_of_values_are_the_row_of_the_update_that_they_cause(number: int, leaky: bool) -> None:
    seen, batch = scene(number)
    if leaky:  # it writes to what it reads
        seen = replace(observe(leaking(), batch, 10, mode="eval"), public_data=seen.public_data)
    graph, gradient = Graph(seen), gradient_of(seen)
    tail = Tail.all(graph, gradient.tensors)[-1]
    outputs = graph.run(batch.inputs).of[graph.head].softmax(1)
    slopes = outputs.detach() - F.one_hot(batch.targets, 10)
    signal = (slopes @ graph.module.get_parameter("last.weight")).float()
    sketch = Sketch(tail, signal, replayed(1).public())
    rows = sketch.of_values(entered(seen, tail, batch.inputs).float()[None])
    sent = [gradient.tensors[f"{each.name}.weight"].flatten(1)[None].float() for each in sketch.plain]
    features = graph.run(batch.inputs).of[tail.features].detach().float()
    assert torch.allclose(rows, sketch.of(sent, features[None]), atol=1e-4)


def test_dominating_examples_have_their_slopes_and_features() -> None:
    seen, batch = scene(2)
    graph = Graph(seen)
    found = Dominating.of(graph, gradient_of(seen), 2)
    values = graph.run(batch.inputs)
    slopes = values.of[graph.head].detach().softmax(1) - F.one_hot(batch.targets, 10)
    order = slopes.norm(dim=1).argsort(descending=True)
    features = values.of[Tail.all(graph, seen.update.tensors)[0].features].detach()
    assert torch.allclose(found.slopes, slopes[order], atol=1e-3)
    assert similar(found.features, features[order]) > 0.999
    assert 0 < found.share < 1


@pytest.mark.parametrize("settings", [{"groups": 2}, {"padding": "same"}])
def test_a_last_convolution_whose_gradients_are_not_sketched_is_searched_by_features(
    settings: dict[str, object],
) -> None:
    seen, batch = scene()
    other = replace(observe(leaking(**settings), batch, 10, mode="eval"), public_data=seen.public_data)
    found = TailMatching(iterations=2, starts=1).reconstruct([other], rng=replayed(1))
    assert found.guess.inputs.isfinite().all()


def test_without_the_number_of_examples_one_is_sought() -> None:
    seen, _ = scene(2)
    found = TailMatching(iterations=2, starts=1).reconstruct([replace(seen, batch_size=None)], rng=replayed(1))
    assert len(found.guess) == 1


def test_what_cannot_be_attacked_is_refused() -> None:
    seen, _ = scene()
    attack = TailMatching(iterations=1, starts=1)
    with pytest.raises(NotDisclosedError):
        attack.reconstruct([replace(seen, public_data=None)], rng=replayed(1))
    public = seen.public_data
    assert public is not None
    one = Batch(public.inputs[:1], public.targets[:1])
    with pytest.raises(UsageError, match="2 public images, got 1"):
        attack.reconstruct([replace(seen, public_data=one)], rng=replayed(1))
    enlarged = Batch(F.interpolate(public.inputs, (12, 12)), public.targets)
    with pytest.raises(UsageError, match="public images of 1 x 8 x 8"):
        attack.reconstruct([replace(seen, public_data=enlarged)], rng=replayed(1))
    zeros = {**seen.update.tensors, "last.weight": torch.zeros(10, 32)}
    with pytest.raises(UsageError, match="zero in the last layer"):
        attack.reconstruct([replace(seen, update=replace(seen.update, tensors=zeros))], rng=replayed(1))
    normed = replace(scene(norm=True)[0], mode="train")
    with pytest.raises(UsageError, match="training mode"):
        attack.reconstruct([normed], rng=replayed(1))


def test_a_network_without_a_value_to_cut_at_is_refused() -> None:
    seen, batch = scene()
    with global_seed(replayed(1)):
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    flat = replace(observe(model, batch, 10, mode="eval"), public_data=seen.public_data)
    with pytest.raises(ModelError, match="convolution reads"):
        TailMatching(iterations=1).reconstruct([flat], rng=replayed(1))


@pytest.mark.parametrize("settings", [{"iterations": 0}, {"starts": 5}, {"learning_rate": 0}, {"most": 1}])
def test_settings_are_checked(settings: dict[str, int]) -> None:
    with pytest.raises((UsageError, ValueError), match="expected"):
        TailMatching(**settings)
