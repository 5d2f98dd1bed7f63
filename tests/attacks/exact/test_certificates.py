"""Certificates of exact attacks: none for a wrong guess, whatever happened to the update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.attacks.exact.linear_inversion import LinearInversion
from leaktight.attacks.exact.spear import Spear
from leaktight.core.errors import LeaktightError
from leaktight.core.protocols import Attack
from leaktight.core.rng import global_seed
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation
from leaktight.data.embedded import Digits
from leaktight.metrics.match import match

DATA = Digits().load(Path())
ATTACKS: dict[int, Attack] = {1: LinearInversion(), 4: Spear(rounds=2)}
Change = Callable[[str, Tensor], Tensor]


def network(*before: nn.Module, width: int = 200, zero_biases: bool = False) -> nn.Module:
    with global_seed(replayed(0)):
        layers = [nn.Linear(DATA.inputs.size, width), nn.ReLU(), nn.Linear(width, DATA.num_classes)]
    for layer in (layers[0], layers[2]) if zero_biases else ():
        assert isinstance(layer, nn.Linear)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*before, nn.Flatten(), *layers)


def changed(seen: Observation, change: Change) -> Observation:
    tensors = {name: change(name, tensor) for name, tensor in seen.update.tensors.items()}
    return replace(seen, update=replace(seen.update, tensors=tensors))


def claims(attack: Attack, seen: Observation, truth: Batch) -> tuple[bool, bool]:
    """Whether the guess is certified, and whether it is right: every image once and over 40 dB."""
    try:
        found = attack.reconstruct([seen], rng=replayed(0))
    except LeaktightError:
        return False, False
    certified = found.certificate is not None and found.certificate.holds
    if len(found.guess) != len(truth):
        return certified, False
    order = match(found.guess.inputs, truth.inputs)
    errors = (found.guess.inputs[order] - truth.inputs).square().flatten(1).mean(1)
    return certified, bool((errors < 1e-4).all())


def noise(size: float) -> Change:
    def change(name: str, tensor: Tensor) -> Tensor:
        drawn = torch.randn(tensor.shape, generator=replayed(len(name)).public())
        return tensor + size * tensor.square().mean().sqrt() * drawn

    return change


def biases(factor: float) -> Change:
    return lambda name, tensor: tensor * factor if name.endswith("bias") else tensor


CHANGES: dict[str, Change] = {
    "noise 1e-4": noise(1e-4),
    "noise 1e-2": noise(1e-2),
    "noise 1e-1": noise(1e-1),
    "float16": lambda name, tensor: tensor.half().float(),
    "pruned": lambda name, tensor: tensor * (tensor.abs() >= tensor.abs().median()),
    "entries clipped": lambda name, tensor: tensor.clamp(-tensor.abs().max() / 2, tensor.abs().max() / 2),
    "tensors clipped": lambda name, tensor: tensor * min(1.0, 0.01 / float(tensor.norm())),
    "biases at another rate": biases(0.7),
    "biases at nearly the same rate": biases(1.03),
}


@pytest.mark.parametrize("count", ATTACKS)
@pytest.mark.parametrize("width", [20, 200])
@pytest.mark.parametrize("zero_biases", [False, True], ids=["biases", "zero biases"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_update_certifies_nothing_wrong(change: str, zero_biases: bool, width: int, count: int) -> None:
    truth = draw(DATA, count, seed=5)
    seen = observe(network(width=width, zero_biases=zero_biases), truth, DATA.num_classes)
    for attack in {ATTACKS[count], ATTACKS[4]}:
        certified, right = claims(attack, changed(seen, CHANGES[change]), truth)
        assert right or not certified


class Jitter(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 0.1 * torch.randn_like(inputs) if self.training else inputs


@pytest.mark.parametrize("count", ATTACKS)
@pytest.mark.parametrize("before", [nn.Dropout(0.3), nn.BatchNorm2d(1), Jitter()], ids=["dropout", "norm", "jitter"])
def test_what_training_does_to_the_inputs_is_not_certified(before: nn.Module, count: int) -> None:
    truth = draw(DATA, count, seed=5)
    dim = Batch(truth.inputs * 0.5, truth.targets)
    for batch in (truth, dim):
        with global_seed(replayed(1)):
            seen = observe(network(before), batch, DATA.num_classes)
        assert claims(ATTACKS[count], seen, batch) == (False, False)


@pytest.mark.parametrize("count", ATTACKS)
def test_images_that_were_normalised_outside_are_not_certified(count: int) -> None:
    truth = draw(DATA, count, seed=5)
    for mean, std in ((0.5, 0.5), (0.1307, 0.3081)):
        used = Batch((truth.inputs - mean) / std, truth.targets)
        assert claims(ATTACKS[count], observe(network(), used, DATA.num_classes), truth) == (False, False)


@pytest.mark.parametrize("count", ATTACKS)
def test_the_same_in_evaluation_is_certified(count: int) -> None:
    truth = draw(DATA, count, seed=5)
    for before in (nn.Dropout(0.3), nn.BatchNorm2d(1)):
        seen = observe(network(before), truth, DATA.num_classes, mode="eval")
        assert claims(ATTACKS[count], seen, truth) == (True, True)


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_with_an_example_twice_is_not_certified(count: int) -> None:
    once = draw(DATA, count, seed=5)
    places = [0, *range(count)]
    twice = Batch(once.inputs[places], once.targets[places])
    assert claims(Spear(), observe(network(), twice, DATA.num_classes), twice) == (False, False)


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_noise_alone_are_no_crash(count: int) -> None:
    truth = draw(DATA, count, seed=5)

    def change(name: str, tensor: Tensor) -> Tensor:
        drawn = torch.randn(tensor.shape, generator=replayed(0).public())
        left, _, right = torch.linalg.svd(drawn if drawn.ndim == 2 else drawn[None], full_matrices=False)
        sizes = torch.where(torch.arange(left.shape[1]) < 30, 1.0, 1e-3)
        made: Tensor = left * sizes @ right
        return made.reshape(tensor.shape)

    seen = changed(observe(network(), truth, DATA.num_classes), change)
    found = Spear(rounds=1).reconstruct([seen], rng=replayed(0))
    assert found.certificate is not None
    assert not found.certificate.holds


def test_clipping_does_not_make_more_examples_than_are_known() -> None:
    truth = draw(DATA, 1, seed=5)
    seen = changed(observe(network(), truth, DATA.num_classes), CHANGES["entries clipped"])
    blind, found = (
        Spear(rounds=1).reconstruct([each], rng=replayed(0)) for each in (replace(seen, batch_size=None), seen)
    )
    assert len(blind.guess) > len(found.guess) == 1


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("count", ATTACKS)
def test_several_steps_certify_nothing_wrong(count: int, decay: float) -> None:
    truth = draw(DATA, count, seed=5)
    for rate in (0.01, 0.5):
        local = LocalTraining(batch_size=count, learning_rate=rate, epochs=3, momentum=0.9, weight_decay=decay)
        certified, right = claims(ATTACKS[count], observe(network(), truth, DATA.num_classes, local=local), truth)
        assert right or not certified


@pytest.mark.parametrize("change", ["exact", "float16", "noise 1e-4"])
@pytest.mark.parametrize("count", ATTACKS)
def test_a_right_guess_is_certified_still(count: int, change: str) -> None:
    truth = draw(DATA, count, seed=5)
    seen = observe(network(zero_biases=True), truth, DATA.num_classes)
    assert claims(ATTACKS[count], changed(seen, {**CHANGES, "exact": biases(1)}[change]), truth) == (True, True)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_the_share_of_signs_is_that_of_the_definition(count: int) -> None:
    """Z and D from the guess and the gradient alone: D = G X^+, zero below 1e-4 of the largest."""
    truth, model = draw(DATA, count, seed=count), network()
    seen = observe(model, truth, DATA.num_classes)
    found = Spear().reconstruct([seen], rng=replayed(0))
    inputs = found.guess.inputs.flatten(1).double()
    weight, bias = (seen.broadcast.params[f"1.{part}"].double() for part in ("weight", "bias"))
    at_outputs = torch.linalg.lstsq(inputs.T, seen.update.tensors["1.weight"].double().T).solution
    outputs = inputs @ weight.T + bias
    agree = (outputs > 0) == (at_outputs.abs() > 1e-4 * at_outputs.abs().amax(1, keepdim=True))
    assert found.certificate is not None
    assert float(agree.double().mean()) == pytest.approx(found.certificate.figure, abs=2e-3)
