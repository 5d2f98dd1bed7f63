"""What `leaktight generator` does: a small generator trained on images that no client holds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from leaktight.cli.console import print_json
from leaktight.cli.display import progress_bars
from leaktight.config.settings import Config, load_config
from leaktight.config.toml import build, plain
from leaktight.core.errors import UsageError
from leaktight.core.files import replace_atomically
from leaktight.core.rng import Rng
from leaktight.core.tensors import digest
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.sources import data_root
from leaktight.models.gan import Dcgan
from leaktight.models.gan_training import GanTraining

SHEET = 64
"""Samples on the sheet."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `leaktight generator train`. training: settings of `GanTraining`; None is its default."""

    config: Path | None
    overrides: list[str]
    data: str | None
    size: int | None
    out: Path
    training: dict[str, Any]
    seed: int
    root: Path | None
    force: bool
    as_json: bool


def run_training(request: Request) -> None:
    """`leaktight generator train`."""
    errors = Console(stderr=True)
    given = {key: value for key, value in request.training.items() if value is not None}
    training: GanTraining = build(GanTraining, given, "generator train", "options")
    if request.out.suffix != ".safetensors":
        raise UsageError(f"expected --out to end in .safetensors, got {request.out}")
    sheet = request.out.with_suffix(".png")
    for path in (request.out, sheet):
        if path.exists() and not request.force:
            raise UsageError(f"{path} is there already; choose another --out, or --force to replace it")
    config = _config(request)
    dataset = config.data.load(data_root(config.data_root))
    public, left_out = public_images(dataset)
    said = f"{dataset.name}: {len(public)} images of the test part, which no client holds"
    errors.print(said + (f"; {left_out} that clients hold too are left out" if left_out else ""), highlight=False)
    start, epochs = time.perf_counter(), training.num_epochs(len(public))
    with progress_bars(errors, disable=not errors.is_terminal) as bars:
        task = bars.add_task("epochs", total=epochs)

        def watch(epoch: int, critic: float, generator: float) -> None:
            bars.update(task, completed=epoch, description=f"epochs, losses {critic:.2f} and {generator:.2f}")
            if not errors.is_terminal:
                errors.print(f"epoch {epoch} of {epochs}: losses {critic:.3f} and {generator:.3f}")

        network = training.train(public, rng=Rng(request.seed).child("generator"), after_epoch=watch)
    notes = _notes(config, training, public, request.seed)
    replace_atomically(request.out, lambda path: save_file(_tensors(network), path, metadata=notes))
    replace_atomically(sheet, _drawing(request.out, request.seed))
    _say(request, notes, sheet, time.perf_counter() - start)


def public_images(dataset: Dataset) -> tuple[Tensor, int]:
    """The images of the test part that are not, byte for byte, among those of the training part; and how many are.

    Clients, and so victims, hold training images only.
    """
    held = set(_bytes(dataset.train))
    kept = [place for place, image in enumerate(_bytes(dataset.test)) if image not in held]
    if not kept:
        raise UsageError(f"{dataset.name}: every test image is a training image too; nothing is public")
    return dataset.test.images[kept], len(dataset.test) - len(kept)


def _bytes(examples: Examples) -> list[bytes]:
    return [image.numpy().tobytes() for image in examples.images]


def _config(request: Request) -> Config:
    """The config's data set, or the one that the options name."""
    named = [f"data.kind={request.data}"] if request.data else []
    named += [f"data.size={request.size}"] if request.size else []
    config = load_config(request.config, [*named, *request.overrides])
    return config if request.root is None else replace(config, data_root=request.root)


def _notes(config: Config, training: GanTraining, public: Tensor, seed: int) -> dict[str, str]:
    """What the file says about itself, as safetensors keep it: text by name."""
    return {
        "made_by": "leaktight generator train",
        "data": json.dumps(plain(config.data)),
        "part": "test",
        "num_images": str(len(public)),
        "images_digest": digest({"images": public}),
        "shape": ",".join(str(side) for side in public.shape[1:]),
        "seed": str(seed),
        "training": json.dumps({field.name: getattr(training, field.name) for field in fields(training)}),
    }


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in network.state_dict().items()}


def _drawing(file: Path, seed: int) -> Callable[[Path], None]:
    """Draws samples of the generator in a file, eight in a row."""

    def draw(path: Path) -> None:
        generator = Dcgan(path=str(file)).read()
        latents = torch.randn(SHEET, generator.latent, generator=Rng(seed).child("sheet").public())
        images = (generator.sample(latents) * 255).round().byte().permute(0, 2, 3, 1).numpy()
        rows = [np.concatenate(list(images[first : first + 8]), axis=1) for first in range(0, SHEET, 8)]
        pixels = np.concatenate(rows)
        Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(path)

    return draw


def _say(request: Request, notes: dict[str, str], sheet: Path, seconds: float) -> None:
    if request.as_json:
        made = {"schema_version": 1, "file": str(request.out), "samples": str(sheet), "seconds": seconds}
        print_json({**made, **notes, "num_images": int(notes["num_images"]), "seed": request.seed})
        return
    console = Console()
    console.print(f"{request.out}   samples: {sheet}   {seconds:.0f} s", highlight=False, soft_wrap=True)
    console.print(
        f'use it: --attack ggl --set \'attack.generator={{kind="dcgan", path="{request.out}"}}\'',
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
