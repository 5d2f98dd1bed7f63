"""`leaktight generator train` as a user runs it, and what comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from tests.attacks.scenes import draw, observe
from tests.e2e.test_train import leaktight
from tests.seeds import replayed

from leaktight.api.generator import public_images
from leaktight.attacks.generative.ggl import Ggl
from leaktight.cli.app import main
from leaktight.config.catalogue import MODELS
from leaktight.config.settings import load_config
from leaktight.core.tensors import digest
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.models.initialise import build_model

TINY = ["--data", "digits", "--size", "8", "--epochs", "1", "--latent", "4", "--width", "4", "--batch-size", "64"]


def test_a_generator_is_trained_on_public_images_and_used(tmp_path: Path) -> None:
    file = tmp_path / "made" / "tiny.safetensors"
    done = leaktight("generator", "train", *TINY, "--out", str(file), "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "images of the test part, which no client holds" in done.stderr
    assert "epoch 1 of 1" in done.stderr
    data = Digits(size=8).load(Path())
    public, left_out = public_images(data)
    assert (said["num_images"], said["images_digest"]) == (len(public), digest({"images": public}))
    assert len(public) + left_out == len(data.test)
    with safe_open(file, "pt") as opened:
        notes = opened.metadata()
    assert (notes["part"], json.loads(notes["data"])["kind"], notes["shape"]) == ("test", "digits", "1,8,8")
    with Image.open(said["samples"]) as sheet:
        assert sheet.size == (64, 64)
    config = load_config(None, [f'attack.generator={{kind="dcgan", path="{file}"}}'], attacks=["ggl"])
    (attack,) = config.attacks
    assert isinstance(attack, Ggl)
    model = build_model(MODELS["lenet_zhu"](), data.inputs, data.num_classes, rng=replayed(0))
    seen = observe(model, draw(data, 1, seed=1), data.num_classes)
    found = Ggl(generator=attack.generator, iterations=2, population=4).reconstruct([seen], rng=replayed(0))
    assert found.guess.inputs.shape == (1, 1, 8, 8)
    again = leaktight("generator", "train", *TINY, "--out", str(file), folder=tmp_path)
    assert again.returncode == 2
    assert "exists; choose another" in again.stderr


def test_images_that_clients_hold_are_left_out() -> None:
    images = torch.arange(6, dtype=torch.uint8).reshape(6, 1, 1, 1).expand(6, 1, 8, 8)
    labels = torch.zeros(6, dtype=torch.int64)
    data = Dataset("made", Examples(images[:4], labels[:4]), Examples(images[2:], labels[2:]), ("a",))
    public, left_out = public_images(data)
    assert left_out == 2
    assert public[:, 0, 0, 0].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "g.pth"], "expected --out to end in .safetensors"),
        (["--out", "g.safetensors", "--kind", "vae"], "expected 'dcgan' or 'wgan_gp', got 'vae'"),
        (["--out", "g.safetensors", "--data", "digit"], "did you mean 'digits'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["leaktight", "generator", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
