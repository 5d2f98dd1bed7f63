"""Robbing the Fed through ordinary rounds: exact recovery, its expectation, and what defenses leave of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.attacks.tampered import KNOWS, Scene, scene
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.attacks.malicious.robbing_the_fed import RobbingTheFed
from leaktight.config.catalogue import MODELS
from leaktight.core.errors import NotDisclosedError, UsageError
from leaktight.core.inputs import Images
from leaktight.core.protocols import ActiveAttack, Defense
from leaktight.core.tensors import parameters_of
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.types import Broadcast
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.defenses.noise import AdditiveNoise
from leaktight.metrics import align, match, psnr
from leaktight.models.imprint import with_imprint
from leaktight.models.initialise import build_model
from leaktight.models.surgery import final_linear


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits(size=16).load(Path())


def network(data: Dataset, kind: str = "lenet_zhu") -> nn.Module:
    return build_model(MODELS[kind](), data.inputs, data.num_classes, rng=replayed(2))


def robbed(played: Scene, attack: RobbingTheFed) -> tuple[Tensor, Tensor]:
    """PSNR of each true image, and whether it is alone in its bin by its own measure."""
    truth, seen = played.play(attack)
    found = attack.reconstruct(seen, rng=replayed(0))
    guess = align(found.guess.inputs, truth.inputs, match(found.guess.inputs, truth.inputs))
    edges = -(seen[-1].broadcast.params["imprint.into.bias"] / attack.gain).double()
    bins = torch.bucketize(truth.inputs.double().flatten(1).mean(1), edges)
    return psnr(guess, truth.inputs), (bins[:, None] == bins).sum(1) == 1


def test_it_is_an_active_attack() -> None:
    assert isinstance(RobbingTheFed(), ActiveAttack)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", ["lenet_zhu", "resnet20"])
def test_exactly_the_images_alone_in_their_bins_are_recovered(digits: Dataset, kind: str, mode: str) -> None:
    played = scene(digits, network(digits, kind), batch=16, mode=mode)  # type: ignore[arg-type]
    scores, alone = robbed(played, RobbingTheFed(num_bins=64))
    assert alone.any()
    assert not alone.all()
    assert ((scores > 60) == alone).all()


@pytest.mark.parametrize("form", ["relu", "hardtanh"])
def test_a_model_change_gives_the_same_images(digits: Dataset, form: str) -> None:
    attack = RobbingTheFed(num_bins=64, form=form, gain=1e-4)  # type: ignore[arg-type]
    gradient, change = (
        robbed(scene(digits, network(digits), batch=16, steps=steps), attack)[0] for steps in ("gradient", "delta")
    )
    assert (gradient > 60).sum() >= 8
    assert ((gradient > 60) == (change > 40)).all()


def test_the_share_is_the_expected_one(digits: Dataset) -> None:
    attack = RobbingTheFed(num_bins=48)
    shares = [
        float((robbed(scene(digits, network(digits), batch=24, seed=seed), attack)[0] > 60).double().mean())
        for seed in range(12)
    ]
    expected = attack.expected_share(24)
    assert expected == pytest.approx((47 / 48) ** 23)
    assert abs(sum(shares) / len(shares) - expected) < 0.1


def test_the_sum_of_many_clients_is_robbed_as_well(digits: Dataset) -> None:
    threat = ThreatModel(server="malicious", sees="aggregate", knows=KNOWS)
    played = scene(digits, network(digits), batch=6, clients=4, steps="delta", threat=threat)
    scores, alone = robbed(played, RobbingTheFed(num_bins=128))
    assert len(scores) == 24
    assert ((scores > 40) == alone).all()


def test_defenses_meet_it(digits: Dataset) -> None:
    clean, noisy = (
        robbed(scene(digits, network(digits), batch=16, defense=defense), RobbingTheFed(num_bins=64))[0]
        for defense in (Defense(), AdditiveNoise(noise_std=10.0))
    )
    assert (clean > 60).sum() >= 8
    assert (noisy > 60).sum() == 0


@pytest.mark.parametrize("measure", ["fourier", "random"])
def test_other_measures(digits: Dataset, measure: str) -> None:
    attack = RobbingTheFed(num_bins=128, measure=measure)  # type: ignore[arg-type]
    truth, seen = scene(digits, network(digits), batch=16).play(attack)
    found = attack.reconstruct(seen, rng=replayed(0)).guess.inputs
    assert (psnr(align(found, truth.inputs, match(found, truth.inputs)), truth.inputs) > 60).sum() >= 8


@pytest.mark.parametrize("law", ["normal", "laplace"])
def test_without_public_data_a_law_is_assumed(digits: Dataset, law: str) -> None:
    threat = ThreatModel(server="malicious", knows=KNOWS - {Knowledge.PUBLIC_DATA})
    played = scene(digits, network(digits), batch=16, threat=threat)
    with pytest.raises(NotDisclosedError, match="public_data"):
        played.play(RobbingTheFed())
    attack = RobbingTheFed(num_bins=256, law=law, center=0.45, spread=0.2)  # type: ignore[arg-type]
    assert (robbed(played, attack)[0] > 60).sum() >= 4


def test_the_module_keeps_all_other_names_and_runs_first(digits: Dataset) -> None:
    model = network(digits)
    changed = with_imprint(model, digits.inputs, 8)
    assert set(parameters_of(changed)) - set(parameters_of(model)) == {
        f"imprint.{layer}.{part}" for layer in ("into", "back") for part in ("weight", "bias")
    }
    assert next(iter(parameters_of(changed))).startswith("imprint.")
    assert final_linear(changed)[0] == final_linear(model)[0]
    assert "imprint" not in dict(model.named_children())
    images = torch.rand(2, *digits.inputs.shape)
    assert torch.allclose(changed(images), model(changed.get_submodule("imprint")(images)))


def test_an_update_of_an_honest_model_holds_no_imprint(digits: Dataset) -> None:
    _, seen = scene(digits, network(digits), batch=8).play(RobbingTheFed(num_bins=16))
    with pytest.raises(UsageError, match="the imprint module"):
        RobbingTheFed().reconstruct(seen[:1], rng=replayed(0))


def test_disguised_rows_still_sort(digits: Dataset) -> None:
    attack = RobbingTheFed(num_bins=64, disguise=0.05)
    truth, seen = scene(digits, network(digits), batch=16).play(attack)
    rows = seen[-1].broadcast.params["imprint.into.weight"]
    assert not torch.equal(rows[0], rows[1])
    found = attack.reconstruct(seen, rng=replayed(0)).guess.inputs
    assert (psnr(align(found, truth.inputs, match(found, truth.inputs)), truth.inputs) > 60).sum() >= 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_bins": 1}, "num_bins >= 2"),
        ({"measure": "colour"}, "measure to be one of"),
        ({"law": "uniform"}, "law to be one of"),
        ({"form": "tanh"}, "form to be one of"),
        ({"gain": 0.0}, "gain > 0"),
        ({"disguise": -1.0}, "disguise >= 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RobbingTheFed(**settings)  # type: ignore[arg-type]


def test_nothing_given_is_changed(digits: Dataset) -> None:
    model = network(digits)
    attack = RobbingTheFed(num_bins=8, law="normal")
    honest = Broadcast(parameters_of(model), {}, 0, model)
    _, seen = scene(digits, model, batch=8).play(replace(attack, law="public"))
    sent = attack.tamper(honest, seen[:1], rng=replayed(0))
    assert sent is not None
    assert sent.model is not model
    assert all(sent.params[name] is tensor for name, tensor in honest.params.items())
    assert "imprint.into.weight" not in honest.params
    assert Images(*digits.inputs.shape) == seen[0].inputs
