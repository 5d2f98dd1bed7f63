"""What an inspection concludes: closed forms, levels with decoys and without, dropout, and a known defense."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.api.inspect import inspect
from leaktight.attacks import CsDlg, InvertingGradients
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Attack
from leaktight.core.rng import global_seed
from leaktight.data.embedded import Digits
from leaktight.defenses import AdditiveNoise, GradientCompression
from leaktight.inspections.copies import copies_of
from leaktight.inspections.files import read_decoys
from leaktight.inspections.truth import Examined, examine
from leaktight.results.schema import Cell, Summary, Trial, Verdict

SHAPE = (1, 8, 8)
RATE = 0.1
DIGITS = Digits(size=8).load(Path()).train
IMAGES = DIGITS.batch().inputs
LABELS = DIGITS.targets
WEAK = InvertingGradients(iterations=10, learning_rate=0.05, onednn=False)
STRONG = CsDlg(iterations=4, restarts=1, onednn=False)


def dense(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), *middle, nn.Linear(40, 10))


def convolutional(*middle: nn.Module) -> nn.Module:
    first = (nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.Sigmoid(), nn.Conv2d(12, 12, 3, padding=1), nn.Sigmoid())
    return nn.Sequential(*first, *middle, nn.Flatten(), nn.Linear(192, 10))


def step(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The change of the model in one step of plain SGD, written without any of our code."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    change = {name: model.state_dict()[name] - before[name] for name in before}
    model.load_state_dict(before)
    model.zero_grad()
    return change


def made(build: Any, *middle: nn.Module, wide: float = 0.0) -> nn.Module:
    with global_seed(replayed(5)):
        model: nn.Module = build(*middle).train()
        if wide:
            for parameter in model.parameters():
                nn.init.uniform_(parameter, -wide, wide)
    return model


def inspected(folder: Path, model: nn.Module, change: Mapping[str, Tensor], **said: Any) -> Summary:
    local = {"learning_rate": RATE}
    return inspect(
        model,
        dict(model.state_dict()),
        update=change,
        kind="delta",
        shape=SHAPE,
        local=local,
        out=folder / "run",
        **said,
    )


def codes(summary: Summary) -> set[str]:
    return {flag.code for flag in summary.flags}


def only(summary: Summary) -> tuple[Verdict, Cell]:
    (verdict,) = summary.verdicts
    return verdict, next(cell for cell in summary.cells if cell.role == "attack")


def labelled(folder: Path, *places: int, name: str = "truth.npz") -> Path:
    """Images with labels, in a file."""
    images = (255 * IMAGES[list(places)]).round().byte().numpy()
    np.savez(folder / name, images=images, labels=LABELS[list(places)].numpy())
    return folder / name


def test_a_closed_form_has_no_loss_that_could_fall(tmp_path: Path) -> None:
    with global_seed(replayed(5)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    places = [int(LABELS.eq(label).nonzero()[0]) for label in (1, 4, 7)]
    change = step(model, IMAGES[places], LABELS[places])
    said = {"attacks": "linear_inversion", "batch_size": 3}
    verdict, cell = only(summary := inspected(tmp_path, model, change, **said))
    assert verdict.verdict == "cannot-conclude", "several examples are not proven"
    assert "linear_inversion computes the picture from the update" in verdict.because
    assert "loss fell" not in verdict.because
    assert "normalisation-unstated" not in codes(summary)
    assert cell.first_loss is None
    verdict, cell = only(inspected(tmp_path / "scored", model, change, truth=labelled(tmp_path, *places), **said))
    assert verdict.verdict == "reconstructed"
    assert (cell.mean_of("ssim") or 0) > 0.9


def test_trials_of_closed_forms_are_valid_whatever_their_losses(tmp_path: Path) -> None:
    line = {
        "schema_version": 2, "id": "a", "attack": "rgap", "role": "attack", "defense": "none", "adaptive": False,
        "trial": 0, "round": 0, "client": "c", "seed": 0, "seconds": 1.0, "first_loss": 1.0, "loss": 1.0,
        "threat": {"server": "curious", "sees": "client", "knows": []},
    }  # fmt: skip
    assert Trial.model_validate({**line, "searches": True}).fault == "its own loss did not fall"
    assert Trial.model_validate({**line, "searches": False}).fault is None


@pytest.mark.parametrize(("build", "chosen"), [(dense, "linear_inversion"), (convolutional, "")])
def test_auto_takes_the_closed_form_that_a_network_allows(tmp_path: Path, build: Any, chosen: str) -> None:
    model = made(build, wide=0.0 if chosen else 0.5)
    change = step(model, IMAGES[:1], LABELS[:1])
    summary = inspected(tmp_path, model, change, settings=["attack.budget=quick"], attacks="auto")
    verdict, cell = only(summary)
    assert bool(chosen) == verdict.certified
    (name,) = cell.chosen
    assert name == chosen or (not chosen and name not in ("linear_inversion", "spear"))


@pytest.mark.parametrize(
    ("build", "middle"),
    [(dense, nn.Dropout(0.5)), (convolutional, nn.Dropout2d(0.25)), (convolutional, nn.Dropout(0.5))],
)
def test_dropout_is_named_and_its_masks_are_read(tmp_path: Path, build: Any, middle: nn.Module) -> None:
    model = made(build, middle, wide=0.5)
    with global_seed(replayed(1)):
        change = step(model, IMAGES[:1], LABELS[:1])
    summary = inspected(
        tmp_path, model, change, truth=labelled(tmp_path, 0), attacks="csdlg", settings=["attack.iterations=60"]
    )
    verdict, cell = only(summary)
    assert codes(summary) == {"dropout"}, "no setting was wrong"
    assert "with these the true images explain it: cosine 1.000" in summary.flags[0].detail
    assert verdict.verdict == "reconstructed"
    assert (cell.mean_of("psnr") or 0) > 25


def test_dropout_that_hides_its_masks_is_still_named_before_settings(tmp_path: Path) -> None:
    model = made(dense, nn.Dropout(0.5))
    with global_seed(replayed(1)):
        change = step(model, IMAGES[:4], LABELS[:4])
    summary = inspected(
        tmp_path, model, change, truth=labelled(tmp_path, 0, 1, 2, 3), attacks="csdlg", settings=["attack.iterations=3"]
    )
    assert "truth-does-not-explain" not in codes(summary)
    first = summary.flags[0]
    assert first.code == "dropout"
    assert "training twice on the true images gives updates with a cosine of" in first.detail


def weakly(folder: Path, place: int, truth: int, **said: Any) -> tuple[Verdict, Cell]:
    """An attack on the update of one digit, by default a weak one, judged against another."""
    folder.mkdir(parents=True, exist_ok=True)
    model = made(convolutional, wide=0.5)
    change = step(model, IMAGES[place : place + 1], LABELS[place : place + 1])
    asked = {"attacks": WEAK, "truth": labelled(folder, truth), **said}
    return only(inspected(folder, model, change, **asked))


def test_a_recognisable_digit_is_identified_with_decoys_and_without(tmp_path: Path) -> None:
    bare, cell = weakly(tmp_path / "copies", 5, 5)
    control = cell.control["ssim"]
    assert control is not None
    assert control + 0.1 < (cell.mean_of("ssim") or 0) < 0.6, "seen, but not reconstructed"
    assert bare.verdict == "identified"
    assert "among its own copies, mirrored, turned and shifted: place 1 of 200" in bare.because
    others = labelled(tmp_path, *range(len(IMAGES)), name="decoys.npz")
    told, cell = weakly(tmp_path / "decoys", 5, 5, decoys=others)
    assert told.verdict == "identified"
    assert "among decoys of the same class: place 1 of 100" in told.because
    assert cell.identification is not None
    assert cell.identification.chance == 0.01


@pytest.mark.parametrize("attack", [WEAK, STRONG], ids=["weak", "strong"])
def test_a_wrong_truth_earns_no_level(tmp_path: Path, attack: Attack) -> None:
    others = LABELS.eq(LABELS[0]).nonzero().flatten()[1:4].tolist()
    for place in others:
        verdict, _ = weakly(tmp_path / str(place), 0, place, attacks=attack)
        assert verdict.verdict == "cannot-conclude", "it does not explain the update, so copies do not count"
        assert "--decoys" in verdict.advice


def test_only_the_right_image_is_verified(tmp_path: Path) -> None:
    from tests.inspections.test_captured import Dense, captured, example

    right = captured(tmp_path, Dense())
    truth = example()
    found = [examine(right, type(truth)(each, truth.targets)) for each in (truth.inputs, truth.inputs.flip(-1))]
    assert [isinstance(each, Examined) and each.verified for each in found] == [True, False]


def test_copies_are_all_arrangements_but_the_image_itself() -> None:
    square, wide = torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 12)
    assert (len(copies_of(square)), len(copies_of(wide))) == (199, 99)
    assert not any(torch.equal(each, square) for each in copies_of(square))
    assert all(
        torch.equal(each.flatten(1).sort().values, square.flatten(1).sort().values) for each in copies_of(square)
    )


def test_decoys_come_with_the_classes_of_their_folders(tmp_path: Path) -> None:
    from PIL import Image

    from leaktight.core.inputs import Images

    for place in range(4):
        folder = tmp_path / ("cat", "dog")[place % 2]
        folder.mkdir(exist_ok=True)
        Image.fromarray((255 * IMAGES[place, 0]).byte().numpy()).save(folder / f"{place}.png")
    found = read_decoys(tmp_path, Images(*SHAPE))
    assert found.labels is not None
    assert found.labels.tolist() == [0, 0, 1, 1]
    with pytest.raises(UsageError, match=r"give --truth, too, or leave --decoys out"):
        inspected(tmp_path, made(dense), dict(made(dense).state_dict()), decoys=IMAGES[:5])


def test_an_attacker_who_knows_what_ran_is_adapted_to_it(tmp_path: Path) -> None:
    model = made(convolutional, wide=0.5)
    change = step(model, IMAGES[:1], LABELS[:1])
    pruned = {name: torch.where(t.abs() >= t.abs().flatten().quantile(0.8), t, 0.0) for name, t in change.items()}
    summary = inspected(
        tmp_path,
        model,
        pruned,
        truth=labelled(tmp_path, 0),
        attacks="csdlg",
        defenses=GradientCompression(prune_share=0.8),
        settings=["attack.iterations=60"],
    )
    scores = {cell.adaptive: cell.mean_of("psnr") or 0 for cell in summary.cells if cell.role == "attack"}
    assert scores[True] > scores[False] + 6, "the same attack, told and not told"
    assert summary.verdicts[0].verdict == "reconstructed"
    assert "no-adaptive-attacker" not in codes(summary)
    assert summary.scenario["defense"] == "compression, known to the attacker"


def test_a_defense_that_attacks_cannot_be_adapted_to_is_said(tmp_path: Path) -> None:
    model = made(dense)
    change = step(model, IMAGES[:1], LABELS[:1])
    said: Any = {"attacks": "linear_inversion", "defenses": AdditiveNoise(noise_std=0.01)}
    summary = inspected(tmp_path, model, change, **said)
    assert "no-adaptive-attacker" in codes(summary)
    assert "none of these attacks can be adapted to it" in str(summary.scenario["defense"])
