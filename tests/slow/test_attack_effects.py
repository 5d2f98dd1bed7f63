"""The effects that the papers claim, on real images: CIFAR-10, LeNet-Zhu with wide weights, batch of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.attacks.scenes import observe
from tests.seeds import replayed

from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.idlg import IdlgAttack
from leaktight.attacks.presets.preset import Preset
from leaktight.config.catalogue import MODELS
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch
from leaktight.data.cifar import Cifar10
from leaktight.data.dataset import Dataset
from leaktight.metrics import match, psnr
from leaktight.models.initialise import build_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def cifar() -> Dataset:
    from tests.conftest import DATA_ROOT

    if not DATA_ROOT.is_dir():
        pytest.skip(f"no real data sets at {DATA_ROOT}; set LEAKTIGHT_DATA to a folder that holds them")
    return Cifar10().load(Path(DATA_ROOT))


def attacked(
    cifar: Dataset, attack: Preset, places: list[int], seed: int, local: LocalTraining | None = None
) -> tuple[list[float], bool]:
    """PSNR of each image, and whether the labels are right."""
    batch: Batch = cifar.train.batch(torch.tensor(places))
    model = build_model(MODELS["lenet_zhu"](), cifar.inputs, cifar.num_classes, init="wide", rng=replayed(seed))
    seen = observe(model, batch, cifar.num_classes, local=local)
    found = attack.reconstruct([replace(seen, labels=batch.targets.sort().values)], rng=replayed(seed))
    guess = found.guess.inputs[match(found.guess.inputs, batch.inputs)]
    right = found.guess.targets.sort().values.tolist() == batch.targets.sort().values.tolist()
    return psnr(guess, batch.inputs).tolist(), right


@pytest.mark.parametrize("attack", [Dlg(), IdlgAttack()], ids=["dlg", "idlg"])
def test_dlg_and_idlg_recover_most_images(cifar: Dataset, attack: Preset) -> None:
    results = [attacked(cifar, attack, [place], seed=100 + place) for place in range(10)]
    assert sum(scores[0] > 30 for scores, _ in results) >= 8, results
    if isinstance(attack, IdlgAttack):
        assert all(right for _, right in results)


def test_csdlg_is_worse_on_two_steps_than_on_one(cifar: Dataset) -> None:
    one = [attacked(cifar, CsDlg(), [place], seed=100 + place)[0][0] for place in range(5)]
    two_steps = LocalTraining(batch_size=1, learning_rate=0.01)
    two = [
        score
        for place in range(5)
        for score in attacked(cifar, CsDlg(), [2 * place, 2 * place + 1], seed=100 + place, local=two_steps)[0]
    ]
    assert sum(one) / len(one) > 30, one
    assert sum(two) / len(two) < sum(one) / len(one) - 5, (one, two)
