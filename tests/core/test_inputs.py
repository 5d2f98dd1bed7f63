"""Every method says which inputs it takes, and refuses others before work starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import pytest
import torch
from tests.attacks.scenes import observe
from tests.seeds import replayed
from torch import Tensor

from leaktight.attacks.controls import MeanImage
from leaktight.attacks.exact.rgap import RGap
from leaktight.attacks.malicious.robbing_the_fed import RobbingTheFed
from leaktight.attacks.matching.attack import Matching
from leaktight.core.errors import DataError, InputsError
from leaktight.core.inputs import ONLY_IMAGES, Images, Inputs, require_inputs
from leaktight.core.protocols import Attack
from leaktight.core.types import Examples
from leaktight.data.embedded import Digits
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.soteria import Soteria
from leaktight.defenses.stack import Stack
from leaktight.models.initialise import build_model
from leaktight.models.small import Mlp


@dataclass(frozen=True)
class Readings(Inputs):
    """A kind that nobody knows: rows of numbers, stored as they are."""

    kind = "readings"

    length: int

    @property
    def shape(self) -> tuple[int]:
        return (self.length,)

    @classmethod
    def of(cls, stored: Tensor) -> Self:
        return cls(stored.shape[1])

    def loaded(self, stored: Tensor) -> Tensor:
        return stored

    def blank(self, count: int, like: Tensor) -> Tensor:
        return like.new_zeros(count, self.length)


def test_examples_are_loaded_by_their_own_kind() -> None:
    rows = torch.rand(4, 3, generator=replayed(0).public())
    examples = Examples(rows, torch.arange(4), Readings)
    assert examples.take(torch.tensor([1, 3])).example == Readings(3)
    assert torch.equal(examples.part(1, 3).batch().inputs, rows[1:3])
    with pytest.raises(DataError, match=r"not supported yet: tables \(inputs of shape 4 x 3\)"):
        Examples(rows, torch.arange(4))
    with pytest.raises(DataError, match=r"expected images \(N, C, H, W\) of bytes, got 4 x 1 x 1 x 3 of float32"):
        Examples(rows[:, None, None], torch.arange(4))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((28, 28, 1), "channels first, got 28,28,1; give 1,28,28"),
        ((32, 30, 3), "give 3,32,30"),
        ((2, 8, 8), "1 or 3 channels, got 2"),
        ((3, 0, 8), "three numbers from 1, got 3,0,8"),
    ],
)
def test_images_have_one_or_three_channels_first(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InputsError, match=message):
        Images(*shape)


def test_a_picture_shows_images_side_by_side_and_black_for_what_is_not_finite() -> None:
    images = torch.zeros(2, 1, 2, 3)
    images[0, 0, 1] = torch.tensor([1.0, 2.0, -1.0])
    images[1, 0, 0, 2] = float("nan")
    assert Images.picture(images).tolist() == [[0] * 6, [255, 255, 0, 0, 0, 0]]
    assert Images.picture(images.expand(2, 3, 2, 3)).shape == (2, 6, 3)


@pytest.mark.parametrize("attack", [Matching(), MeanImage(), RGap()])
def test_an_attack_refuses_other_inputs_by_name(attack: Attack) -> None:
    data = Digits(size=8).load(Path())
    model = build_model(Mlp(hidden=(4,)), data.inputs, data.num_classes, rng=replayed(0))
    seen = replace(observe(model, data.train.batch(torch.tensor([0])), 10), inputs=Readings(64))
    with pytest.raises(InputsError, match=f"expected images for {type(attack).__name__}, got readings"):
        attack.reconstruct([seen], rng=replayed(1))
    with pytest.raises(InputsError, match="got readings"):
        RobbingTheFed(law="normal").tamper(seen.broadcast, [seen], rng=replayed(1))


def test_a_network_of_the_catalogue_refuses_other_inputs() -> None:
    with pytest.raises(InputsError, match="expected images for Mlp, got readings"):
        build_model(Mlp(), Readings(4), 2, rng=replayed(0))


def test_a_stack_takes_what_all_of_its_parts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = ONLY_IMAGES | {Readings}
    monkeypatch.setattr(AdditiveNoise, "takes", everything)
    assert Stack(parts=(AdditiveNoise(), AdditiveNoise())).takes == everything
    mixed = Stack(parts=(AdditiveNoise(), Soteria()))
    assert mixed.takes == ONLY_IMAGES
    with pytest.raises(InputsError, match="expected images for mine, got readings"):
        require_inputs("mine", mixed.takes, Readings(2))
