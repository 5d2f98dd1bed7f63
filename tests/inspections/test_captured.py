"""A captured update: read in every form, fitted to its network, and every mismatch named."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.adaptive.auto import Auto
from leaktight.api.inspect import inspect
from leaktight.attacks.labels.rules import rule_for
from leaktight.core.errors import DataError, UsageError
from leaktight.core.inputs import Images, Inputs
from leaktight.core.rng import global_seed
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch
from leaktight.inspections.captured import Captured, CaptureSettings, ChangeKind, count_examples, load_capture
from leaktight.inspections.checks import check_capture, looks_of
from leaktight.inspections.files import TrueExamples, read_tensors, read_truth
from leaktight.inspections.truth import examine
from leaktight.models.source import Normalize

SHAPE = Images(1, 6, 6)
CLASSES = 4
LOCAL = LocalTraining(learning_rate=0.1, batch_size=1)


@dataclass(frozen=True)
class Small:
    """A network with batch normalisation, so that its state holds more than parameters."""

    width: int = 3

    def build(self, inputs: Inputs, num_classes: int) -> nn.Module:
        channels, height, width = inputs.shape
        pixels = self.width * (height - 2) * (width - 2)
        return nn.Sequential(
            nn.Conv2d(channels, self.width, 3),
            nn.BatchNorm2d(self.width),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(pixels, num_classes),
        )


@dataclass(frozen=True)
class Dense:
    """A network whose first layer sees the pixels."""

    hidden: int = 8

    def build(self, inputs: Inputs, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs.size, self.hidden), nn.Sigmoid(), nn.Linear(8, num_classes))


def made(source: Small | Dense) -> nn.Module:
    with global_seed(replayed(5)):
        return source.build(SHAPE, CLASSES)


def example(count: int = 1) -> Batch:
    generator = replayed(1).public()
    images = torch.randint(0, 256, (count, *SHAPE.shape), generator=generator).float() / 255
    return Batch(images, torch.arange(count) % CLASSES)


def trained(model: nn.Module, batch: Batch, normalise: nn.Module | None = None, steps: int = 1) -> dict[str, Tensor]:
    """The state after plain SGD, written without any of our code."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LOCAL.learning_rate)
    inputs = batch.inputs if normalise is None else normalise(batch.inputs)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), batch.targets).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def saved(folder: Path, name: str, state: Mapping[str, Tensor]) -> Path:
    torch.save(dict(state), folder / name)
    return folder / name


def settings(source: Small | Dense, **changes: Any) -> CaptureSettings:
    return CaptureSettings(model=source, inputs=SHAPE, local=LOCAL, **changes)


def captured(
    folder: Path,
    source: Small | Dense,
    *,
    change: Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]] = lambda before, after: after,
    kind: ChangeKind = "after",
    normalise: nn.Module | None = None,
    **said: Any,
) -> Captured:
    """One step on one example, captured, and changed before it is saved."""
    model = made(source)
    before = state_of(model)
    after = trained(model, example(), normalise)
    received = read_tensors(saved(folder, "before.pt", before))
    sent = read_tensors(saved(folder, "change.pt", change(before, after)))
    return load_capture(settings(source, **said), received, sent, kind)


def codes(seen: Captured) -> set[str]:
    return {flag.code for flag in check_capture(seen)}


def delta(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: after[name] - before[name] for name in dict(made(Dense()).named_parameters())}


def as_torch(path: Path, state: dict[str, Tensor]) -> Path:
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def as_safetensors(path: Path, state: dict[str, Tensor]) -> Path:
    save_file(state, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def as_named_arrays(path: Path, state: dict[str, Tensor]) -> Path:
    np.savez(path.with_suffix(".npz"), **{name: tensor.numpy() for name, tensor in state.items()})  # type: ignore[arg-type]
    return path.with_suffix(".npz")


def as_flower(path: Path, state: dict[str, Tensor]) -> Path:
    """What a Flower client's get_parameters gives, saved as Flower's tutorial saves it."""
    np.savez(path.with_suffix(".npz"), *[tensor.numpy() for tensor in state.values()])
    return path.with_suffix(".npz")


def as_list(path: Path, state: dict[str, Tensor]) -> Path:
    torch.save([state[name] for name, _ in made(Small()).named_parameters()], path.with_suffix(".pth"))
    return path.with_suffix(".pth")


@pytest.mark.parametrize("save", [as_torch, as_safetensors, as_named_arrays, as_flower, as_list])
def test_every_form_gives_the_same_change(tmp_path: Path, save: Callable[[Path, dict[str, Tensor]], Path]) -> None:
    model = made(Small())
    before = state_of(model)
    after = trained(model, example(2))
    held = read_tensors(saved(tmp_path, "before.pt", before))
    found = load_capture(
        settings(Small(), num_examples=2), held, read_tensors(save(tmp_path / "after", after)), "after"
    )
    assert list(found.seen.update.tensors) == [name for name, _ in model.named_parameters()]
    for name, tensor in found.seen.update.tensors.items():
        torch.testing.assert_close(tensor, after[name] - before[name])
    buffers = found.seen.update.buffers
    if save is as_list:  # parameters alone
        assert buffers is None
    else:
        assert buffers is not None
        assert torch.equal(buffers["1.running_mean"], after["1.running_mean"])
    assert found.seen.num_classes == CLASSES
    assert torch.equal(found.seen.broadcast.buffers["1.running_var"], before["1.running_var"])


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"weight": Trap()}, tmp_path / "saved.pt")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps({"weight": Trap()}))
    np.savez(tmp_path / "objects.npz", weight=np.array([Trap()], dtype=object))
    for name, words in (("saved.pt", "names posix.mkdir"), ("raw.pth", "could run code"), ("objects.npz", "pickle")):
        with pytest.raises(UsageError, match=words):
            read_tensors(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_files_that_hold_no_tensors_are_named(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "numbers.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"12")
    for name, words in (
        ("numbers.pt", "expected a dict or list of tensors"),
        ("torn.safetensors", "cannot read"),
        ("gone.pt", "got none"),
        ("model.onnx", "ending in .pt"),
    ):
        with pytest.raises(UsageError, match=words):
            read_tensors(tmp_path / name)


def renamed(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("1.", "first."): tensor for name, tensor in after.items()}


def quantised(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**after, "1.weight": after["1.weight"].to(torch.int8)}


def broken(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**after, "3.bias": after["3.bias"] / 0}


@pytest.mark.parametrize(
    ("change", "said", "words"),
    [
        (renamed, {}, r"unexpected: first.weight, first.bias"),
        (quantised, {}, r"of another type: 1.weight int8, the model has float32"),
        (broken, {}, r"'3.bias' holds a NaN or an infinity"),
        (lambda before, after: before, {}, r"before.pt and .*change.pt are equal: nothing to attack"),
        (
            lambda before, after: after,
            {"num_classes": 7},
            r"3.weight 4 x 8 \(the model has 7 x 8\).*last layer of the file has 4 rows, but --classes is 7",
        ),
        (lambda before, after: after, {"labels": (4,)}, r"labels from 0 to 3, got 4"),
        (lambda before, after: {"3.bias": after["3.bias"], "4.bias": after["3.bias"]}, {}, "unexpected: 4.bias"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Any, said: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        captured(tmp_path, Dense(), change=change, **said)


def test_arrays_without_names_are_counted_and_their_shapes_compared(tmp_path: Path) -> None:
    state = state_of(made(Small()))
    before = read_tensors(saved(tmp_path, "before.pt", state))
    np.savez(tmp_path / "few.npz", *[tensor.numpy() for tensor in list(state.values())[:4]])
    with pytest.raises(UsageError, match=r"expected 9 \(the state dict\) or 6 \(the parameters\) arrays .* got 4"):
        load_capture(settings(Small()), before, read_tensors(tmp_path / "few.npz"), "after")
    np.savez(tmp_path / "turned.npz", *[tensor.numpy() for tensor in reversed(state.values())])
    with pytest.raises(UsageError, match=r"0.weight 4 \(the model has 3 x 1 x 3 x 3\)"):
        load_capture(settings(Small()), before, read_tensors(tmp_path / "turned.npz"), "after")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"mean": (123.0,), "std": (58.0,)}, "divide both by 255"),
        ({"mean": (0.5, 0.5), "std": (0.5, 0.5)}, "1 number for grey images, got 2"),
        ({"mean": (0.5,), "std": (0.0,)}, "std > 0"),
        ({"labels": (1, 2)}, "labels of 1 examples, got 2"),
        ({"num_examples": 0}, "batch size >= 1"),
        ({"local": LocalTraining(batch_size=8)}, "at most 1, the examples behind the update, got 8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(settings(Dense()), **said)


def test_all_that_counts_examples_has_to_agree() -> None:
    two = TrueExamples(torch.zeros(2, *SHAPE.shape), None)
    assert count_examples(None, None, None) is None
    assert count_examples(2, (1, 3), two) == 2
    with pytest.raises(UsageError, match=r"--batch-size 1, --labels 3, --truth 2"):
        count_examples(1, (1, 2, 3), two)


def test_a_plain_update_raises_no_flag(tmp_path: Path) -> None:
    assert codes(captured(tmp_path, Dense())) == set()
    assert codes(captured(tmp_path, Small())) == set()


def pruned(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = replayed(2).public()
    keep = {name: torch.rand(tensor.shape, generator=generator) < 0.5 for name, tensor in after.items()}
    return {name: torch.where(keep[name] | (tensor.ndim < 2), tensor, before[name]) for name, tensor in after.items()}


def halved(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float16) for name, tensor in after.items()}


def clipped(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    changes = delta(before, after)
    norm = looks_of(changes).norm
    return {name: tensor * (0.5 / norm) for name, tensor in changes.items()}


def noisy(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = replayed(3).public()
    return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in after.items()}


@pytest.mark.parametrize(
    ("change", "kind", "code"),
    [
        (pruned, "after", "update-sparse"),
        (halved, "after", "update-coarse"),
        (clipped, "delta", "update-clipped"),
        (noisy, "after", "not-plain-cross-entropy"),
        (lambda before, after: {n: 30 * t for n, t in delta(before, after).items()}, "delta", "update-scaled"),
        (lambda before, after: {n: -t for n, t in delta(before, after).items()}, "delta", "update-turned"),
        (lambda before, after: {n: t for n, t in after.items() if not n.startswith("1")}, "after", "update-partial"),
    ],
)
def test_what_was_done_to_an_update_is_seen(tmp_path: Path, change: Any, kind: ChangeKind, code: str) -> None:
    assert code in codes(captured(tmp_path, Dense(), change=change, kind=kind))


def test_zeros_of_units_that_are_off_do_not_count_as_pruned() -> None:
    weight = torch.zeros(6, 6)
    weight[::2, ::3] = 1.0
    looks = looks_of({"weight": weight})
    assert (looks.zeros, looks.pruned) == (30 / 36, 0.0)


def test_a_normalisation_that_nobody_stated_is_found(tmp_path: Path) -> None:
    usual = Normalize((0.1307,), (0.3081,))
    said: Any = {"mean": (0.1307,), "std": (0.3081,)}
    silent = captured(tmp_path, Dense(), normalise=usual)
    stated = captured(tmp_path, Dense(), normalise=usual, **said)
    wrongly = captured(tmp_path, Dense(), **said)
    assert codes(silent) == {"inputs-normalised"}
    assert codes(stated) == set()
    known = examine(stated, example())
    assert known is not None
    assert known.verified
    for wrong, words in ((silent, "MNIST (--mean 0.1307 --std 0.3081)"), (wrongly, "none")):
        found = examine(wrong, example())
        assert found is not None
        assert found.flag is not None
        assert f"with normalisation {words} it is 1.000" in found.flag.detail


def test_a_wrong_mode_is_found_by_the_truth(tmp_path: Path) -> None:
    right = captured(tmp_path, Small())
    wrong = captured(tmp_path, Small(), mode="eval")
    known = examine(right, example())
    assert known is not None
    assert known.verified
    assert known.flag is None
    found = examine(wrong, example())
    assert found is not None
    assert not found.verified
    assert found.flag is not None
    assert "--mode train it is 1.000" in found.flag.detail
    assert "--mode train" in found.flag.advice


def test_attacks_make_do_with_what_is_known(tmp_path: Path) -> None:
    known = captured(tmp_path, Dense(), labels=(0,))
    unknown = load_capture(
        replace(settings(Dense()), local=None),
        read_tensors(tmp_path / "before.pt"),
        read_tensors(tmp_path / "change.pt"),
        "after",
    )
    assert Auto().fitted(known.seen).labels == "given"
    rule = rule_for(unknown.seen)
    assert rule is not None
    assert rule.infer(unknown.seen, 1, rng=replayed(0)).tolist() == [0]
    blind = Auto(budget="quick").fitted(unknown.seen)
    assert blind.labels == "inferred"
    found = blind.reconstruct([unknown.seen], rng=replayed(0))
    assert found.guess.inputs.shape == (1, *SHAPE.shape)
    assert found.labels is not None
    assert found.labels.tolist() == [0]


def test_true_images_come_from_a_picture_a_folder_or_arrays(tmp_path: Path) -> None:
    pixels = (example(2).inputs * 255).round().byte().numpy()
    (tmp_path / "folder").mkdir()
    for place in range(2):
        Image.fromarray(pixels[place, 0]).save(tmp_path / "folder" / f"{place}.png")
    np.savez(tmp_path / "arrays.npz", images=pixels, labels=np.array([2, 1]))
    folder, arrays = (read_truth(tmp_path / name, SHAPE) for name in ("folder", "arrays.npz"))
    single = read_truth(tmp_path / "folder" / "1.png", SHAPE)
    assert torch.equal(folder.images, example(2).inputs)
    assert torch.equal(arrays.images, folder.images)
    assert torch.equal(single.images, folder.images[1:])
    assert arrays.labels is not None
    assert arrays.labels.tolist() == [2, 1]
    with pytest.raises(DataError, match=r"expected 1x8x8 as in --shape, got 1x6x6"):
        read_truth(tmp_path / "folder", Images(1, 8, 8))


def gradient_of_three() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """An MLP with ReLU and the gradient of three images."""
    with global_seed(replayed(5)):
        hidden = (nn.Linear(36, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU())
        model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(40, 4))
        images = torch.rand(3, 1, 6, 6)
    nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 3])).backward()
    return model, {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}


def test_without_an_attack_named_auto_proves_a_batch_and_says_which_attack_did(tmp_path: Path) -> None:
    model, gradient = gradient_of_three()
    asked = {"update": gradient, "kind": "gradient", "shape": (1, 6, 6), "batch_size": 3}
    summary = inspect(model, dict(model.state_dict()), **asked, out=tmp_path / "run")  # type: ignore[arg-type]
    assert summary.verdicts[0].certified
    assert "normalisation-unstated" not in {each.code for each in summary.flags}, "there was no loss to fall"
    cell = next(each for each in summary.cells if each.attack == "auto")
    assert cell.labels is not None
    assert sorted(cell.labels) == [0, 1, 3]
    assert dict(cell.chosen) == {"spear": 1}


@pytest.mark.parametrize(("attack", "word"), [("spear", "reconstructed"), ("cocktail_party", "cannot-conclude")])
def test_only_a_proof_is_reconstructed_without_the_truth(tmp_path: Path, attack: str, word: str) -> None:
    model, gradient = gradient_of_three()
    summary = inspect(
        model,
        dict(model.state_dict()),
        update=gradient,
        kind="gradient",
        shape=(1, 6, 6),
        batch_size=3,
        attacks=attack,
        out=tmp_path / "run",
    )
    (verdict,) = summary.verdicts
    assert (verdict.verdict, verdict.certified) == (word, word == "reconstructed")
    assert ("(certified)" in (tmp_path / "run" / "report.html").read_text()) == verdict.certified


@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_truth_that_contradicts_a_proof_is_flagged(tmp_path: Path, right: int) -> None:
    with global_seed(replayed(5)):
        layers = (nn.Linear(144, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 4))
        model = nn.Sequential(nn.Flatten(), *layers)
        images, others = torch.rand(2, 3, 1, 12, 12)
    nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 3])).backward()
    given = torch.cat([images[:right], others[right:]])
    np.savez(tmp_path / "truth.npz", images=given.numpy())
    summary = inspect(
        model,
        dict(model.state_dict()),
        update={name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None},
        kind="gradient",
        shape=(1, 12, 12),
        batch_size=3,
        attacks="spear",
        truth=tmp_path / "truth.npz",
        out=tmp_path / "run",
    )
    (verdict,) = summary.verdicts
    codes = {flag.code for flag in summary.flags}
    assert verdict.verdict == ("reconstructed" if right else "cannot-conclude")
    assert verdict.certified == (right == 3)
    assert ("truth-contradicts-proof" in codes) == (right < 3)
    assert "normalisation-unstated" not in codes
