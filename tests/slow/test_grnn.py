"""GRNN on real images: CIFAR-100, LeNet-Zhu with wide weights, batch of one (docs/results/generative.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.attacks.scenes import observe
from tests.seeds import replayed

from leaktight.attacks.generative.grnn import Grnn
from leaktight.config.catalogue import MODELS
from leaktight.data.cifar import Cifar100
from leaktight.metrics import psnr
from leaktight.models.initialise import build_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_images_of_a_batch_of_one_are_recovered(real_data: Path) -> None:
    cifar = Cifar100(part="test").load(real_data)
    scores = []
    for place in (0, 700, 1500):
        batch = cifar.train.batch(torch.tensor([place]))
        model = build_model(
            MODELS["lenet_zhu"](), cifar.inputs, cifar.num_classes, init="wide", rng=replayed(100 + place)
        )
        found = Grnn().reconstruct([observe(model, batch, cifar.num_classes)], rng=replayed(100 + place))
        assert torch.equal(found.guess.targets, batch.targets)
        scores.append(float(psnr(found.guess.inputs, batch.inputs)))
    assert sum(scores) / len(scores) > 30, scores
