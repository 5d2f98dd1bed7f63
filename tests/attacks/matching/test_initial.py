"""Starting images: their distributions, tiles, and that a seed decides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.seeds import replayed

from leaktight.attacks.matching.sought import Grey, Noise, Patterned, Start

STARTS = [Noise(), Noise(distribution="uniform"), Patterned(), Patterned(patch=4, distribution="normal"), Grey()]


@pytest.mark.parametrize("start", STARTS, ids=repr)
def test_a_seed_decides_the_images(start: Start) -> None:
    shape = (2, 3, 32, 32)
    one, same, other = (start.draw(shape, replayed(seed).public()) for seed in (0, 0, 1))
    assert one.shape == shape
    assert one.dtype is torch.float32
    assert torch.equal(one, same)
    assert torch.equal(one, other) == isinstance(start, Grey)


@pytest.mark.parametrize(
    ("distribution", "mean", "std"),
    [("normal", 0.5, 0.25), ("standard_normal", 0.0, 1.0), ("uniform", 0.5, 12**-0.5)],
)
def test_noise_has_its_moments(distribution: Any, mean: float, std: float) -> None:
    pixels = Noise(distribution=distribution).draw((8, 3, 64, 64), replayed(3).public()).double()
    assert float(pixels.mean()) == pytest.approx(mean, abs=0.02)
    assert float(pixels.std()) == pytest.approx(std, rel=0.02)
    if distribution == "uniform":
        assert 0 <= float(pixels.min()) < float(pixels.max()) <= 1


def test_patterns_repeat_and_images_differ() -> None:
    pixels = Patterned().draw((2, 3, 32, 32), replayed(0).public())
    corner = pixels[..., :16, :16]
    assert torch.equal(pixels, corner.tile(2, 2))
    assert not torch.equal(pixels[0], pixels[1])
    assert len(corner.unique()) > 1000


def test_patterns_are_cut_at_the_edges() -> None:
    pixels = Patterned(patch=4).draw((1, 1, 10, 7), replayed(0).public())
    assert pixels.shape == (1, 1, 10, 7)
    assert torch.equal(pixels[..., 8:10, :], pixels[..., 0:2, :])
    assert torch.equal(pixels[..., 4:7], pixels[..., 0:3])


def test_grey() -> None:
    assert Grey(level=0.25).draw((1, 1, 2, 2), replayed(0).public()).unique().tolist() == [0.25]


@pytest.mark.parametrize(
    ("kind", "bad"), [(Noise, {"distribution": "cauchy"}), (Patterned, {"patch": 0}), (Grey, {"level": 1.5})]
)
def test_bad_settings_are_refused(kind: type[Start], bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        kind(**bad)
