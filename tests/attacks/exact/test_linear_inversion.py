"""Linear-layer inversion on real updates of the embedded sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import nn

from leaktight.attacks.exact.linear_inversion import LinearInversion
from leaktight.config.catalogue import MODELS
from leaktight.core.errors import ModelError, NotDisclosedError, UsageError
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits, Faces
from leaktight.models.initialise import build_model


@pytest.fixture(scope="module", params=["digits", "faces"])
def data(request: pytest.FixtureRequest) -> Dataset:
    return (Digits() if request.param == "digits" else Faces()).load(Path())


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("local", [None, LocalTraining(batch_size=1, learning_rate=0.5)], ids=["gradient", "delta"])
def test_one_image_is_exact_on_an_mlp(data: Dataset, normalised: bool, local: LocalTraining | None) -> None:
    source = MODELS["mlp"](mean=(0.4,), std=(0.3,)) if normalised else MODELS["mlp"]()
    model = build_model(source, data.inputs, data.num_classes, rng=replayed(1))
    batch = draw(data, 1, seed=5)
    found = LinearInversion().reconstruct([observe(model, batch, data.num_classes, local=local)], rng=replayed(0))
    # A model change is the difference of rounded weights, which costs digits.
    assert (found.guess.inputs - batch.inputs).abs().max() < (1e-4 if local is None else 2e-3)
    assert found.guess.targets.tolist() == batch.targets.tolist()
    assert bool(found.notes["assumed"]) is (local is not None)


def test_several_images_with_different_labels_are_exact_on_one_layer() -> None:
    data = Digits().load(Path())
    model = build_model(MODELS["logistic_regression"](), data.inputs, data.num_classes, rng=replayed(1))
    batch = draw(data, 4, seed=5, unique=True)
    seen = observe(model, batch, data.num_classes)
    order = batch.targets.argsort()
    rough = LinearInversion(refinements=0).reconstruct([seen], rng=replayed(0))
    exact = LinearInversion().reconstruct([seen], rng=replayed(0))
    errors = [(found.guess.inputs - batch.inputs[order]).abs().max() for found in (rough, exact)]
    assert exact.guess.targets.tolist() == batch.targets[order].tolist()
    assert errors[1] < 1e-4 < errors[0], "the row of a label is only mostly its image"
    assert exact.loss < 1e-5 < rough.loss


def test_a_label_that_comes_twice_is_a_reason(data: Dataset) -> None:
    model = build_model(MODELS["logistic_regression"](), data.inputs, data.num_classes, rng=replayed(1))
    batch = draw(data, 4, seed=5, classes=2)
    seen = replace(observe(model, batch, data.num_classes), labels=batch.targets.sort().values)
    with pytest.raises(UsageError, match="no label twice"):
        LinearInversion().reconstruct([seen], rng=replayed(0))


def test_what_it_cannot_invert_it_names(data: Dataset) -> None:
    one, two = draw(data, 1, seed=5), draw(data, 2, seed=5)
    lenet = build_model(MODELS["lenet_zhu"](), data.inputs, data.num_classes, rng=replayed(1))
    with pytest.raises(ModelError, match=r"linear layer with a bias first, got 'features\.0'"):
        LinearInversion().reconstruct([observe(lenet, one, data.num_classes)], rng=replayed(0))
    mlp = build_model(MODELS["mlp"](), data.inputs, data.num_classes, rng=replayed(1))
    with pytest.raises(UsageError, match="one example, or a network of one linear layer, got 2"):
        LinearInversion().reconstruct([observe(mlp, two, data.num_classes)], rng=replayed(0))
    seen = observe(mlp, one, data.num_classes)
    with pytest.raises(NotDisclosedError):
        LinearInversion().reconstruct([replace(seen, batch_size=None)], rng=replayed(0))
    kept = {name: tensor for name, tensor in seen.update.tensors.items() if name != "classifier.0.bias"}
    with pytest.raises(UsageError, match="withheld"):
        LinearInversion().reconstruct([replace(seen, update=replace(seen.update, tensors=kept))], rng=replayed(0))
    with pytest.raises(ValueError, match="refinements >= 0"):
        LinearInversion(refinements=-1)


class Mixed(nn.Module):
    """Pixels are added up before the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.first(inputs.flatten(1).cumsum(1))
        return outputs


def test_pixels_that_are_mixed_on_the_way_are_noticed() -> None:
    seen = observe(Mixed(), Batch(torch.rand(1, 1, 4, 4), torch.tensor([1])), 3)
    with pytest.raises(ModelError, match="a mixture"):
        LinearInversion().reconstruct([seen], rng=replayed(0))
