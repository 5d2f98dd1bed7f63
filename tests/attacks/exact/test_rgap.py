"""R-GAP, its rank analysis, and the leakage bound per layer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import nn

from leaktight.attacks.exact.rank_analysis import gradient_matrix, leakage_bounds
from leaktight.attacks.exact.rgap import RGap, margins
from leaktight.config.catalogue import MODELS
from leaktight.core.errors import ModelError, UsageError
from leaktight.core.inputs import Images
from leaktight.core.rng import global_seed
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.metrics import psnr
from leaktight.models.initialise import build_model
from leaktight.models.small import Cnn6


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits(size=8).load(Path())


def two_classes(batch: Batch) -> Batch:
    return Batch(batch.inputs, batch.targets % 2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("head", ["logistic", "linear"])
def test_cnn6_gives_its_input_away(digits: Dataset, head: Literal["logistic", "linear"], seed: int) -> None:
    classes = 2 if head == "logistic" else digits.num_classes
    batch = draw(digits, 1, seed)
    batch = two_classes(batch) if head == "logistic" else batch
    model = build_model(Cnn6(head=head), digits.inputs, classes, rng=replayed(seed))
    found = RGap().reconstruct([observe(model, batch, classes)], rng=replayed(0))
    assert psnr(found.guess.inputs, batch.inputs).item() > 60
    assert found.guess.targets.tolist() == batch.targets.tolist()
    assert found.notes["failed_at"] is None
    assert [layer["unknowns"] for layer in found.notes["layers"]][-1] == 8 * 8
    assert all(layer["rank"] == layer["unknowns"] for layer in found.notes["layers"])


def test_known_labels_leave_fewer_attempts(digits: Dataset) -> None:
    batch = two_classes(draw(digits, 1, 0))
    model = build_model(Cnn6(), digits.inputs, 2, rng=replayed(0))
    seen = observe(model, batch, 2)
    blind = RGap().reconstruct([seen], rng=replayed(0))
    told = RGap().reconstruct([replace(seen, labels=batch.targets)], rng=replayed(0))
    assert told.notes["attempts"] < blind.notes["attempts"] or blind.notes["attempts"] == 2
    assert torch.allclose(told.guess.inputs, blind.guess.inputs, atol=1e-3)


def chain(seed: int, *layers: nn.Module) -> nn.Module:
    with global_seed(replayed(seed)):
        for layer in layers:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.reset_parameters()
    return nn.Sequential(*layers)


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.1), nn.Sigmoid(), nn.Tanh(), nn.ReLU()], ids=str)
def test_other_activations_and_hidden_linear_layers(activation: nn.Module) -> None:
    model = chain(
        3, nn.Conv2d(1, 12, 3, padding=1), activation, nn.Flatten(), nn.Linear(432, 40), activation, nn.Linear(40, 3)
    )
    batch = Batch(torch.rand(1, 1, 6, 6, generator=replayed(1).public()), torch.tensor([2]))
    found = RGap().reconstruct(
        [observe(model.double(), Batch(batch.inputs.double(), batch.targets), 3)], rng=replayed(0)
    )
    assert psnr(found.guess.inputs, batch.inputs).item() > 40
    assert found.guess.targets.tolist() == [2]


def test_a_layer_that_hides_its_input_is_reported() -> None:
    model = chain(3, nn.Conv2d(3, 1, 4, stride=4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(4, 3))
    batch = Batch(torch.rand(1, 3, 8, 8, generator=replayed(1).public()), torch.tensor([0]))
    found = RGap().reconstruct([observe(model, batch, 3)], rng=replayed(0))
    assert found.notes["failed_at"] == "0"
    layer = found.notes["layers"][0]
    assert layer["unknowns"] == 192
    assert layer["rank"] <= 48 + 4, "a gradient of 48 numbers and 4 outputs"
    assert not layer["determined"]


def test_what_it_does_not_fit_it_names(digits: Dataset) -> None:
    batch = draw(digits, 1, 0)
    pooled = build_model(MODELS["grnn_lenet"](), Images(1, 32, 32), 10, rng=replayed(0))
    large = Batch(torch.rand(1, 1, 32, 32), torch.tensor([1]))
    with pytest.raises(ModelError, match="got MaxPool2d"):
        RGap().reconstruct([observe(pooled, large, 10)], rng=replayed(0))
    model = build_model(Cnn6(head="linear"), digits.inputs, 10, rng=replayed(0))
    with pytest.raises(UsageError, match="one example for rgap, got 2"):
        RGap().reconstruct([observe(model, draw(digits, 2, 0), 10)], rng=replayed(0))
    logistic = build_model(Cnn6(), digits.inputs, 2, rng=replayed(0))
    change = observe(logistic, two_classes(batch), 2, local=LocalTraining(batch_size=1))
    with pytest.raises(UsageError, match="needs the size of the gradient"):
        RGap().reconstruct([replace(change, local_training=None)], rng=replayed(0))


@given(st.floats(-20, 20))
def test_the_margin_is_among_the_roots(margin: float) -> None:
    product = -margin / (1 + math.exp(margin))
    found = margins(product)
    assert all(-root / (1 + math.exp(root)) == pytest.approx(product, abs=1e-12) for root in found)
    if abs(margin - 1.2784645) > 1e-3:
        assert min(abs(root - margin) for root in found) < 1e-6 * max(1, abs(margin))


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), [(3, 1, 1, 1), (4, 2, 2, 1), (3, 1, 0, 2)])
def test_the_matrix_is_that_of_the_weights_gradient(kernel: int, stride: int, padding: int, dilation: int) -> None:
    layer = nn.Conv2d(2, 3, kernel, stride=stride, padding=padding, dilation=dilation).double()
    image = torch.rand(1, 2, 7, 6, dtype=torch.float64)
    signal = torch.rand_like(layer(image))
    (wanted,) = torch.autograd.grad((layer(image) * signal).sum(), [layer.weight])
    matrix = gradient_matrix(layer, signal[0], (7, 6))
    found = torch.stack([matrix @ image[0, channel].flatten() for channel in range(2)], 1)
    assert torch.allclose(found.reshape(3, kernel * kernel, 2).permute(0, 2, 1).reshape(wanted.shape), wanted)


def test_the_bound_counts_what_a_jacobian_counts() -> None:
    """The gradient of a layer's weights as a function of what entered it, what flows back held still."""
    model = chain(1, nn.Conv2d(2, 2, 3, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 3)).double()
    batch = Batch(torch.rand(2, 2, 6, 6, generator=replayed(0).public(), dtype=torch.float64), torch.tensor([0, 2]))
    bounds = leakage_bounds(model, parameters_of(model), buffers_of(model), batch)
    outputs: list[torch.Tensor] = []
    handle = model.get_submodule("0").register_forward_hook(lambda module, inputs, output: outputs.append(output))
    loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
    handle.remove()
    (signal,) = torch.autograd.grad(loss, outputs)
    weight = torch.rand(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def weights_gradient(images: torch.Tensor) -> torch.Tensor:
        outputs = nn.functional.conv2d(images, weight, stride=2)
        return torch.autograd.grad(outputs, weight, signal, create_graph=True)[0]

    jacobian = torch.autograd.functional.jacobian(weights_gradient, batch.inputs)
    assert isinstance(jacobian, torch.Tensor)
    assert bounds[0].rank == int(torch.linalg.matrix_rank(jacobian.reshape(36, 144)))
    assert (bounds[0].unknowns, bounds[0].equations, bounds[0].outputs) == (144, 36, 16)
    assert [bound.layer for bound in bounds] == ["0", "3"]
    assert not bounds[0].determines_input
    assert bounds[1].determines_input, "two examples and three rows that are not parallel"
    assert bounds[0].share == bounds[0].rank / 144


def test_a_batch_hides_in_a_linear_layer_with_too_few_rows() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    images = torch.rand(5, 1, 4, 4, generator=replayed(0).public())
    bounds = [
        leakage_bounds(model, parameters_of(model), {}, Batch(images[:count], torch.arange(count) % 3))[0]
        for count in (1, 2, 5)
    ]
    assert [bound.determines_input for bound in bounds] == [True, True, False]
    assert bounds[2].rank == 2 * 16, "the rows of p - y add up to zero"


def test_a_tolerance_refuses_an_update_that_no_single_example_has(digits: Dataset) -> None:
    batch = draw(digits, 1, 0)
    model = build_model(Cnn6(head="linear"), digits.inputs, digits.num_classes, rng=replayed(0))
    seen = observe(model, batch, digits.num_classes)
    plain, strict = RGap(), RGap(tolerance=0.01)
    same = [attack.reconstruct([seen], rng=replayed(0)).guess.inputs for attack in (plain, strict)]
    assert torch.equal(*same)
    pruned = {name: tensor * (tensor.abs() >= tensor.abs().median()) for name, tensor in seen.update.tensors.items()}
    changed = replace(seen, update=replace(seen.update, tensors=pruned))
    plain.reconstruct([changed], rng=replayed(0))
    with pytest.raises(UsageError, match="expected the gradient of one example"):
        strict.reconstruct([changed], rng=replayed(0))


def test_a_tolerance_ends_the_descent_at_a_layer_that_no_single_example_has(digits: Dataset) -> None:
    """A defense that leaves the last layer as it is."""
    batch = draw(digits, 1, 0)
    model = build_model(Cnn6(head="linear"), digits.inputs, digits.num_classes, rng=replayed(0))
    seen = observe(model, batch, digits.num_classes)
    layers = [layer["layer"] for layer in RGap().reconstruct([seen], rng=replayed(0)).notes["layers"]]
    tensors = dict(seen.update.tensors)
    tensors[f"{layers[1]}.weight"] = tensors[f"{layers[1]}.weight"].flip(0)
    changed = replace(seen, update=replace(seen.update, tensors=tensors))
    found = RGap().reconstruct([changed], rng=replayed(0)).notes["layers"]
    assert [layer["residual"] < 0.1 for layer in found[:2]] == [True, False]
    with pytest.raises(UsageError, match=f"expected the gradient of one example in '{layers[1]}'"):
        RGap(tolerance=0.01).reconstruct([changed], rng=replayed(0))
