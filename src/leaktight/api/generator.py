"""Training a small image generator on images that no client holds, for the attacks ggl and gias."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from leaktight.config.settings import Config
from leaktight.config.toml import table_of
from leaktight.core.errors import UsageError
from leaktight.core.files import replace_atomically
from leaktight.core.rng import Rng
from leaktight.core.tensors import digest
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset, data_root
from leaktight.models.gan import Dcgan
from leaktight.models.gan_training import GanTraining

SHEET = 64
"""The number of samples in the picture."""


@dataclass(frozen=True)
class TrainedGenerator:
    """file: the weights. samples: a picture of generated images. notes: the metadata of the file."""

    file: Path
    samples: Path
    notes: Mapping[str, str]
    seconds: float


@dataclass(frozen=True)
class PlannedGenerator:
    """A generator that is ready to be trained.

    public: the training images (N, C, H, W). left_out: the number of test images that clients hold too.
    """

    config: Config
    training: GanTraining
    out: Path
    seed: int
    dataset: Dataset
    public: Tensor
    left_out: int

    @property
    def epochs(self) -> int:
        return self.training.num_epochs(len(self.public))

    def run(self, watch: Callable[[int, float, float], None]) -> TrainedGenerator:
        """Train and write the files. watch: called after each epoch with its number and both losses."""
        start, sheet = time.perf_counter(), self.out.with_suffix(".png")
        network = self.training.train(self.public, rng=Rng(self.seed).child("generator"), after_epoch=watch)
        notes = _notes(self.config, self.training, self.public, self.seed)
        replace_atomically(self.out, lambda path: save_file(_tensors(network), path, metadata=notes))
        replace_atomically(sheet, _drawing(self.out, self.seed))
        return TrainedGenerator(self.out, sheet, notes, time.perf_counter() - start)


def plan(config: Config, training: GanTraining, out: Path, *, seed: int = 0, force: bool = False) -> PlannedGenerator:
    """Read the data and check everything. force: replace existing files."""
    if out.suffix != ".safetensors":
        raise UsageError(f"expected --out to end in .safetensors, got {out}")
    for path in (out, out.with_suffix(".png")):
        if path.exists() and not force:
            raise UsageError(f"{path} exists; choose another --out, or --force to replace it")
    dataset = config.data.load(data_root(config.data_root))
    public, left_out = public_images(dataset)
    return PlannedGenerator(config, training, out, seed, dataset, public, left_out)


def public_images(dataset: Dataset) -> tuple[Tensor, int]:
    """The test images that are not also training images, byte for byte, and the number of those left out.

    Clients, and so victims, hold training images only.
    """
    held = set(_bytes(dataset.train))
    kept = [place for place, image in enumerate(_bytes(dataset.test)) if image not in held]
    if not kept:
        raise UsageError(f"{dataset.name}: every test image is also a training image; use another data set")
    return dataset.test.inputs[kept], len(dataset.test) - len(kept)


def _bytes(examples: Examples) -> list[bytes]:
    return [image.numpy().tobytes() for image in examples.inputs]


def _notes(config: Config, training: GanTraining, public: Tensor, seed: int) -> dict[str, str]:
    """The metadata of the file: text by name."""
    return {
        "made_by": "leaktight generator train",
        "data": json.dumps(table_of(config.data)),
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
    """A function that draws samples of the generator in `file`, eight in a row."""

    def draw(path: Path) -> None:
        generator = Dcgan(path=str(file)).read()
        latents = torch.randn(SHEET, generator.latent, generator=Rng(seed).child("sheet").public())
        images = (generator.sample(latents) * 255).round().byte().permute(0, 2, 3, 1).numpy()
        rows = [np.concatenate(list(images[first : first + 8]), axis=1) for first in range(0, SHEET, 8)]
        pixels = np.concatenate(rows)
        Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(path)

    return draw
