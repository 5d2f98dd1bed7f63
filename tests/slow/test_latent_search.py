"""GGL and GIAS with the published generator of faces: nearer to the victim than the best of 100 random samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.attacks.scenes import observe
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.attacks.generative.ggl import Ggl
from leaktight.attacks.generative.gias import Gias
from leaktight.attacks.presets.preset import Preset
from leaktight.core.inputs import Images
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.types import Batch
from leaktight.metrics.lpips import Lpips
from leaktight.models.gan import Dcgan
from leaktight.models.initialise import build_model
from leaktight.models.small import LeNetZhu
from leaktight.models.surgery import representation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

VICTIMS = 10


@pytest.fixture(scope="module")
def root() -> Path:
    from tests.conftest import DATA_ROOT

    if not DATA_ROOT.is_dir():
        pytest.skip(f"no real data sets at {DATA_ROOT}; set LEAKTIGHT_DATA to a folder that holds them")
    return Path(DATA_ROOT)


def features(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return representation(model, parameters_of(model), buffers_of(model), images)


@pytest.mark.parametrize("kind", ["ggl", "gias"])
def test_nearer_than_the_best_of_a_hundred_samples(root: Path, kind: str) -> None:
    """The victims are faces that the generator can make, of latents that the attacker does not know."""
    source = Dcgan(path=str(root / "gan_dcgan_faces64" / "netG_digiface64.pth"))
    attacks: dict[str, Preset] = {
        "ggl": Ggl(generator=source, optimizer="adam", iterations=300, restarts=3, kl=1e-3, onednn=True),
        "gias": Gias(
            generator=source,
            latent_iterations=200,
            iterations=150,
            learning_rate=2e-4,
            total_variation=1e-3,
            onednn=True,
        ),
    }
    generator = source.read()
    faces = generator.sample(torch.randn(VICTIMS, 100, generator=replayed(5).child("victims").public()))
    random = generator.sample(torch.randn(100, 100, generator=replayed(9).public()))
    model = build_model(LeNetZhu(activation="relu"), Images(3, 64, 64), 10, rng=replayed(0))
    labels = torch.arange(VICTIMS)
    victims = []
    for place in range(VICTIMS):
        batch = Batch(faces[place : place + 1], labels[place : place + 1])
        victims.append([replace(observe(model, batch, 10, mode="eval"), labels=batch.targets)])
    found = [attacks[kind].reconstruct(seen, rng=replayed(1).child(place)) for place, seen in enumerate(victims)]
    lpips = Lpips(root=root, net="alex")
    nearer = 0
    for face, answer in zip(faces.split(1), found, strict=True):
        truth = face.expand(len(random), -1, -1, -1)
        looks = float(lpips(answer.guess.inputs, face)) < float(lpips(random, truth).min())
        gaps = (features(model, images) - features(model, face) for images in (answer.guess.inputs, random))
        own, best = (float(gap.square().mean(1).min()) for gap in gaps)
        nearer += looks and own < best
    assert nearer >= 8
    assert [int(answer.guess.targets) for answer in found] == labels.tolist()
