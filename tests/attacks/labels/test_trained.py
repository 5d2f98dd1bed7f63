"""Labels of networks that have learned: from public images, and from batch statistics that are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import Tensor, nn
from torch.nn.functional import batch_norm, cross_entropy, one_hot

from leaktight.attacks.labels.ilrg import Ilrg
from leaktight.attacks.labels.last_layer import LabelStrategy, head_gradient
from leaktight.attacks.labels.public import PublicImages, Traces, sent_moments
from leaktight.attacks.labels.rules import BiasCorrected, Geng, rule_for
from leaktight.core.errors import NotDisclosedError, UsageError
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.metrics.labels import label_accuracy
from leaktight.models.initialise import build_model
from leaktight.models.small import LeNetZhu


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits().load(Path())


class Normed(nn.Module):
    """Two convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.fc = nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.bn1(self.conv1(inputs)).relu()
        outputs: Tensor = self.fc(self.bn2(self.conv2(hidden)).relu().mean((2, 3)))
        return outputs


@lru_cache
def trained() -> Normed:
    """A network that has learned half of the training images."""
    data = Digits().load(Path())
    examples = data.train.batch(torch.arange(600))
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251
        model = Normed()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(20):
            for part in torch.randperm(600, generator=torch.Generator().manual_seed(epoch)).split(50):
                optimizer.zero_grad()
                cross_entropy(model(examples.inputs[part]), examples.targets[part]).backward()
                optimizer.step()
    return model


def public(data: Dataset) -> Batch:
    return data.test.batch(torch.arange(300))


def accuracy(rule: LabelStrategy, scenes: list[tuple[Observation, Batch]]) -> float:
    scores = [label_accuracy(rule.infer(seen, len(batch), rng=replayed(0)), batch.targets) for seen, batch in scenes]
    return sum(scores) / len(scores)


def scenes_of(data: Dataset, classes: int | None = None, **options: object) -> list[tuple[Observation, Batch]]:
    scenes = []
    for seed in range(5):
        batch = draw(data, 64, seed, classes)
        seen = observe(trained(), batch, 10, **options)  # type: ignore[arg-type]
        scenes.append((replace(seen, public_data=public(data)), batch))
    return scenes


def test_the_statistics_are_those_of_the_batch(digits: Dataset) -> None:
    """Solved from the buffers that are sent, against a forward pass over the client's own images."""
    (seen, batch), *_ = scenes_of(digits)
    found = sent_moments(seen, len(batch))
    assert found is not None
    model = trained()
    hidden: Tensor = model.conv1(batch.inputs).detach()
    shown = batch_norm(hidden, None, None, model.bn1.weight, model.bn1.bias, training=True).relu()
    after: Tensor = model.conv2(shown).detach()
    for name, entered in (("bn1", hidden.double()), ("bn2", after.double())):
        mean, square = found[name].chunk(2)
        torch.testing.assert_close(mean, entered.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(square, entered.square().mean((0, 2, 3)), rtol=2e-5, atol=2e-5)
    assert sent_moments(replace(seen, update=replace(seen.update, buffers=None)), len(batch)) is None


@pytest.mark.parametrize("size", [64, 4])
def test_an_update_is_the_mean_of_what_its_examples_leave_alone(digits: Dataset, size: int) -> None:
    """The client's own images one by one, in the network with the solved statistics, against what the client sent."""
    batch = draw(digits, size, seed=1)
    seen = observe(trained(), batch, 10)
    sent, head = sent_moments(seen, size), head_gradient(seen)
    assert sent is not None
    alone = [Traces.of(seen, head, Batch(image[None], label[None]), sent, size) for image, label in pairs(batch)]
    slopes = [each.probabilities[0] - one_hot(label, 10) for each, label in zip(alone, batch.targets, strict=True)]
    torch.testing.assert_close(torch.stack(slopes).mean(0), head.needed_bias(), rtol=1e-3, atol=1e-6)
    for name, expected in sent.items():
        torch.testing.assert_close(
            torch.cat([each.moments[name] for each in alone]).mean(0), expected, rtol=1e-4, atol=1e-4
        )


def pairs(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    return list(zip(batch.inputs, batch.targets, strict=True))


@pytest.mark.parametrize("classes", [None, 3], ids=["uniform", "three classes"])
def test_public_images_read_labels_of_a_trained_network(digits: Dataset, classes: int | None) -> None:
    """Better than rules that have only noise or the update."""
    scenes = scenes_of(digits, classes)
    others = max(accuracy(rule, scenes) for rule in (Geng(), BiasCorrected(), Ilrg()))
    assert accuracy(PublicImages(), scenes) >= max(0.9, others + 0.02)


def test_batch_statistics_help(digits: Dataset) -> None:
    scenes = scenes_of(digits)
    assert accuracy(PublicImages(), scenes) > accuracy(PublicImages(layers=0), scenes) + 0.02


def test_more_public_images_help(digits: Dataset) -> None:
    scenes = scenes_of(digits)
    assert accuracy(PublicImages(), scenes) > accuracy(PublicImages(most=40), scenes) + 0.01


@pytest.mark.parametrize("rule", [PublicImages(), Ilrg()], ids=["public_images", "ilrg"])
@pytest.mark.parametrize("steps", [1, 4])
def test_an_untrained_network_tells_its_labels(digits: Dataset, rule: LabelStrategy, steps: int) -> None:
    local = LocalTraining(batch_size=64 // steps, learning_rate=0.001, momentum=0.5, weight_decay=0.01)
    scenes = []
    for seed in range(5):
        model = build_model(LeNetZhu(), digits.inputs, 10, rng=replayed(seed))
        batch = draw(digits, 64, seed)
        scenes.append((replace(observe(model, batch, 10, local=local), public_data=public(digits)), batch))
    assert accuracy(rule, scenes) >= 0.97


def without_public(seen: Observation) -> Observation:
    return replace(seen, public_data=None)


def adam(seen: Observation) -> Observation:
    return replace(seen, update=replace(seen.update, kind="delta"), local_training=LocalTraining(optimizer="adam"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [(lambda seen: seen, PublicImages), (without_public, Ilrg), (adam, BiasCorrected)],
)
def test_the_best_rule_that_the_facts_allow(
    digits: Dataset, change: Callable[[Observation], Observation], expected: type[LabelStrategy]
) -> None:
    (seen, _), *_ = scenes_of(digits)
    assert type(rule_for(change(seen))) is expected


def test_what_is_missing_is_named(digits: Dataset) -> None:
    (seen, _), *_ = scenes_of(digits)
    with pytest.raises(NotDisclosedError, match="public_data"):
        PublicImages().infer(without_public(seen), 64, rng=replayed(0))
    with pytest.raises(UsageError, match="sgd"):
        PublicImages().infer(adam(seen), 64, rng=replayed(0))
