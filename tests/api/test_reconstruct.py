"""`lt.reconstruct`: the images behind an update in memory, as `lt.inspect` finds them, and nothing is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.seeds import replayed
from torch import Tensor, nn
from torch.nn import functional as F

import leaktight as lt
from leaktight.core.errors import UsageError
from leaktight.core.rng import global_seed

SHAPE = (1, 8, 8)
QUICK = lt.attacks.CsDlg(iterations=40)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEAKTIGHT_DATA", str(tmp_path / "data"))


def digits(count: int = 1) -> tuple[Tensor, Tensor]:
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:count, None] / 16, torch.tensor(found.target)[:count]


def convolutional() -> nn.Module:
    with global_seed(replayed(0)):
        return nn.Sequential(nn.Conv2d(1, 12, 5, 2, 2), nn.Sigmoid(), nn.Flatten(), nn.Linear(192, 10))


def dense(units: int = 32) -> nn.Module:
    with global_seed(replayed(0)):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, units), nn.Sigmoid(), nn.Linear(units, 10))


def gradient_of(model: nn.Module, count: int = 1) -> list[Tensor]:
    images, labels = digits(count)
    return list(torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters())))


def test_a_picture_comes_back_and_nothing_is_written(tmp_path: Path) -> None:
    model, (image, label) = convolutional(), digits()
    before = copy.deepcopy(model.state_dict())
    found = lt.reconstruct(model, gradient_of(model), SHAPE)
    assert found.score(image)["psnr"] > 50
    assert found.score(image)["ssim"] > 0.99
    assert torch.equal(found.labels, label)
    assert found.images.shape == (1, *SHAPE)
    assert float((found.images - image).abs().max()) < 1e-3
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not list(tmp_path.iterdir())


def test_a_closed_form_proves_its_guess() -> None:
    model, (image, _) = dense(), digits()
    found = lt.reconstruct(model, gradient_of(model), lt.Images(*SHAPE), attack=lt.attacks.LinearInversion())
    assert found.certificate is not None
    assert found.certificate.holds
    assert found.attack == "linear_inversion"
    assert found.score(image)["psnr"] > 60


def test_it_is_what_inspect_finds() -> None:
    model, (image, _) = convolutional(), digits()
    gradient = gradient_of(model)
    found = lt.reconstruct(model, gradient, SHAPE, attack=QUICK)
    summary = lt.inspect(
        model, model.state_dict(), shape=SHAPE, update=gradient, kind="gradient", attacks=[QUICK], truth=image
    )
    (cell,) = (cell for cell in summary.cells if cell.role == "attack")
    assert (cell.loss, cell.first_loss, cell.labels) == (found.loss, found.first_loss, tuple(found.labels.tolist()))
    assert cell.mean_of("psnr") == pytest.approx(found.score(image)["psnr"], abs=1e-9)


def test_names_an_order_arrays_and_a_file_are_the_same() -> None:
    model = convolutional()
    ordered = gradient_of(model)
    named = {name: each for (name, _), each in zip(model.named_parameters(), ordered, strict=True)}
    arrays = [each.numpy() for each in ordered]
    np.savez("gradient.npz", *arrays)
    attack = lt.attacks.CsDlg(iterations=3)
    guesses = [lt.reconstruct(model, each, SHAPE, attack=attack) for each in (ordered, named, arrays, "gradient.npz")]
    assert all(torch.equal(guess.images, guesses[0].images) for guess in guesses)


def test_a_delta_of_several_steps_of_a_batch() -> None:
    model, (images, labels) = dense(), digits(2)
    after = copy.deepcopy(model)
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(after(images), labels).backward()
        optimizer.step()
    was = dict(model.named_parameters())
    delta = {name: (tensor - was[name]).detach() for name, tensor in after.named_parameters()}
    attack = lt.attacks.CsDlg(iterations=400)
    told: dict[str, Any] = {"kind": "delta", "labels": labels, "attack": attack}
    found = lt.reconstruct(model, delta, SHAPE, learning_rate=0.1, steps=3, **told)
    again = lt.reconstruct(model, delta, SHAPE, local={"learning_rate": 0.1, "steps": 3}, **told)
    assert torch.equal(found.images, again.images)
    assert found.score(images.flip(0)) == pytest.approx(found.score(images))
    assert found.score(images)["psnr"] > 20
    assert found.loss < 0.1 * (found.first_loss or 0)


def test_the_mode_is_that_of_the_model() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    attack = lt.attacks.LinearInversion()
    for network, mode in ((model.train(), "train"), (copy.deepcopy(model).eval(), "eval")):
        found = lt.reconstruct(network, gradient_of(network), SHAPE, attack=attack)
        assert found.inspection.captured.settings.mode == mode


class HeadFirst(nn.Module):
    """A network whose last layer is defined first, so that the last matrix of its state is another."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(32, 10), nn.Linear(64, 32)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(inputs.flatten(1)).sigmoid())
        return found


@pytest.mark.parametrize(
    "network", [HeadFirst, lambda: nn.Sequential(nn.Conv2d(1, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())]
)
def test_the_classes_are_the_outputs_of_the_network(network: Callable[[], nn.Module]) -> None:
    model = network()
    found = lt.reconstruct(model, gradient_of(model), SHAPE, attack=lt.attacks.CsDlg(iterations=1), labels=[0])
    assert found.inspection.captured.seen.num_classes == 10


def test_doubts_about_the_update_are_told() -> None:
    model = dense()
    turned = [-each for each in gradient_of(model)]
    found = lt.reconstruct(model, turned, SHAPE, attack=lt.attacks.CsDlg(iterations=1))
    assert "update-turned" in {flag.code for flag in found.flags}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"inputs": (8, 8)}, "for grey images give 1,8,8"),
        ({"inputs": (8, 8, 1)}, "channels first, got 8,8,1; give 1,8,8"),
        ({"inputs": (4, 8, 8)}, "1 or 3 channels, got 4"),
        ({"inputs": (64,)}, "not supported yet: tables"),
        ({"inputs": (1, 9, 9)}, "takes images of 1x9x9"),
        ({"update": [torch.zeros(3)]}, "expected 4 .* arrays in gradient, got 1"),
        ({"update": torch.zeros(3)}, "got a Tensor; give all tensors"),
        ({"update": [None, None, None, None]}, "expected tensors, got a NoneType as arr_0"),
        ({"update": {"1.weight": torch.zeros(2, 2)}}, "does not fit the model; of another shape: 1.weight"),
        ({"update": {}}, "does not fit the model|no trainable"),
        ({"attack": "cdslg"}, "did you mean 'csdlg'"),
        ({"attack": ["csdlg", "dlg"]}, "expected one attack, got 2"),
        ({"learning_rate": 0.1}, "a gradient of one batch has no local training"),
        ({"kind": "delta", "steps": 2}, "expected --local learning_rate"),
        ({"kind": "delta", "steps": 2, "local": {"learning_rate": 1.0}}, "expected either local or steps"),
        ({"batch_size": 0}, "batch size >= 1, got 0"),
        ({"mean": (0.5,)}, "got a mean alone; give a std too"),
        ({"labels": [12]}, "expected labels from 0 to 9, got 12"),
        ({"model": None}, "got a NoneType; give before, too"),
        ({"model": "mlp"}, "got the name 'mlp' alone; give before, too"),
        ({"model": nn.Sequential(nn.Flatten(), nn.LazyLinear(10))}, "run the model once"),
        ({"model": nn.Conv2d(1, 10, 1), "update": [torch.ones(10, 1, 1, 1), torch.ones(10)]},
         "not supported yet: segmentation"),
    ],
)  # fmt: skip
def test_errors_are_those_of_inspect(said: dict[str, Any], message: str) -> None:
    model = dense()
    call: dict[str, Any] = {"model": model, "update": gradient_of(model), "inputs": SHAPE, **said}
    with pytest.raises(UsageError, match=message) as error:
        lt.reconstruct(**call)
    assert "\n" not in str(error.value)
    assert "tensor(" not in str(error.value)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (torch.zeros(1, 1, 9, 9), "expected 1x8x8"),
        (torch.zeros(2, 1, 8, 8), "expected 1 true image, .* got 2"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.uint8), "divide bytes by 255"),
        (torch.full((1, 1, 8, 8), -2.0), r"expected images in \[0, 1\], got -2 to -2; undo"),
    ],
)
def test_truths_that_do_not_fit(truth: Tensor, message: str) -> None:
    model = dense()
    found = lt.reconstruct(model, gradient_of(model), SHAPE, attack=lt.attacks.LinearInversion())
    with pytest.raises(UsageError, match=message):
        found.score(truth)
