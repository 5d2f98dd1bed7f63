"""Re-identification counts a face if its person is among the first names of the recogniser."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leaktight.reproductions.tables.grnn import Face, Recogniser, _named


class ByBrightness(nn.Module):
    """Names the person whose number is nearest to the pixel's brightness in tenths."""

    def forward(self, images: Tensor) -> Tensor:
        return -(10 * images.flatten(1)[:, :1] - torch.arange(10)).abs()


def face(brightness: float, person: int, *, recovered: bool) -> Face:
    guess = torch.full((1, 1, 1), brightness)
    return Face("victim 0", "GRNN", guess, guess, person, recovered)


def test_faces_are_counted_by_their_place_among_the_names() -> None:
    faces = [face(0.5, 5, recovered=True), face(0.51, 6, recovered=True), face(0.1, 9, recovered=False)]
    found = _named(ByBrightness(), faces)
    assert found["Top-1"] == 50.0
    assert found["Top-3"] == 100.0
    assert found["Top-3, all faces"] == pytest.approx(200 / 3)
    assert found["share recovered"] == pytest.approx(2 / 3)
    assert "Top-1" not in _named(ByBrightness(), faces[2:])


def test_the_settings_of_the_recogniser() -> None:
    assert Recogniser.of(["recogniser.epochs=2", "recogniser.batches=1,4"]) == Recogniser(epochs=2, batches=(1, 4))
