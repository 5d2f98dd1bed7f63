"""Image generators from files: networks from latent vectors to images, for attacks that search latents.

`GeneratorSource` (the catalogue's `generators`) are the settings; `read` loads the network with its weights.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call

from leaktight.core.errors import ModelError, require_at_least
from leaktight.core.inputs import Images
from leaktight.core.own import check_target
from leaktight.core.tensors import buffers_of, cloned
from leaktight.core.text import sides
from leaktight.core.types import Params
from leaktight.models.initialise import load_weights, read_weights
from leaktight.models.source import reason, require_choice
from leaktight.models.user import built_by

Output: TypeAlias = Literal["tanh", "unit"]

_TO_UNIT: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda pixels: (pixels + 1) / 2,
    "unit": lambda pixels: pixels,
}


@dataclass(frozen=True)
class Generator:
    """A network from latents (N, `latent`) to images, with its weights, in evaluation mode.

    makes: its images. num_classes: the classes of a class-conditional generator; None if it takes only latents.
    output: the range of its pixels, "tanh" [-1, 1] or "unit" [0, 1].
    weights, statistics: its parameters and its buffers by name.
    """

    network: nn.Module
    latent: int
    makes: Images
    num_classes: int | None = None
    output: Output = "tanh"

    @property
    def weights(self) -> dict[str, Tensor]:
        return cloned(dict(self.network.named_parameters()))

    @property
    def statistics(self) -> dict[str, Tensor]:
        return cloned(buffers_of(self.network))

    def images(self, weights: Params, statistics: Params, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images (N, C, H, W) in [0, 1]: a pure function of tensors. labels (N,): for a class-conditional generator."""
        inputs = (latents,) if self.num_classes is None else (latents, labels)
        made: Tensor = functional_call(self.network, (dict(weights), dict(statistics)), inputs)
        return _TO_UNIT[self.output](made).clamp(0, 1)

    def sample(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images of these latents with the weights of the file."""
        with torch.no_grad():
            return self.images(self.weights, self.statistics, latents, labels)

    def fitted(self, images: Tensor, wanted: Images) -> Tensor:
        """Images of the generator, resized to `wanted` by averaging areas, as GGL reduces 256 to 224 pixels."""
        return images if self.makes == wanted else F.interpolate(images, size=wanted.shape[1:], mode="area")

    def check_fits(self, wanted: Images, num_classes: int) -> None:
        """Raise ModelError unless its images are at least as large as `wanted`, and of all classes if conditional."""
        sides = zip(self.makes.shape[1:], wanted.shape[1:], strict=True)
        if self.makes.channels != wanted.channels or any(own < side for own, side in sides):
            raise ModelError(
                f"expected a generator of images of {wanted}, got one of {self.makes}; scale the data or "
                "train a generator for them (leaktight generator train)"
            )
        if self.num_classes is not None and self.num_classes < num_classes:
            raise ModelError(
                f"expected a generator of all {num_classes} classes, got one of {self.num_classes}; choose another"
            )


@dataclass(frozen=True, kw_only=True)
class GeneratorSource(ABC):
    """Settings of a generator."""

    @abstractmethod
    def read(self) -> Generator:
        """The generator with its weights."""


@dataclass(frozen=True, kw_only=True)
class Dcgan(GeneratorSource):
    """DCGAN of any size from a file: `leaktight generator train` writes such files, PyTorch's example does too.

    path: .pth, .pt, .ckpt or .safetensors. The weights determine the sizes of latents, layers and images.
    Reference: Radford et al., Unsupervised Representation Learning with DCGANs, ICLR 2016.
    """

    path: str

    def read(self) -> Generator:
        path = Path(self.path)
        kernels = [tensor for tensor in _in_order(read_weights(path)) if tensor.ndim == 4]
        if len(kernels) < 2:
            raise ModelError(
                f"expected transposed convolutions of a DCGAN in {path}, got {len(kernels)}; name the architecture "
                'by kind = "own_generator"'
            )
        latent, *start = (kernels[0].shape[place] for place in (0, 2, 3))
        widths = [kernel.shape[0] for kernel in kernels[1:]]
        sides = [side * 2 ** len(widths) for side in start]
        shape = _stored_shape(path) or Images(kernels[-1].shape[1], *sides)
        network = DcganNetwork(latent, widths, shape)
        load_weights(network, path)
        return _ready(network, latent, f"the DCGAN in {path}")


@dataclass(frozen=True, kw_only=True)
class MlpGan(GeneratorSource):
    """Linear layers with ReLU between them, from a file: the small GAN of MNIST tutorials.

    path: the weights, named as those of an `nn.Sequential`. shape: channels, height and width of its images.
    """

    path: str
    shape: tuple[int, int, int] = (1, 28, 28)

    def __post_init__(self) -> None:
        require_at_least(1, shape=min(self.shape))

    def read(self) -> Generator:
        sizes = [tensor.shape for tensor in _in_order(read_weights(Path(self.path))) if tensor.ndim == 2]
        if not sizes or sizes[-1][0] != math.prod(self.shape):
            raise ModelError(
                f"expected linear layers that end in {math.prod(self.shape)} outputs in {self.path}, got "
                f"{', '.join(map(sides, sizes)) or 'none'}; set shape to that of the images"
            )
        network = MlpNetwork([sizes[0][1], *(size[0] for size in sizes)], Images(*self.shape))
        load_weights(network.layers, self.path)
        return _ready(network, sizes[0][1], f"the network in {self.path}")


@dataclass(frozen=True, kw_only=True)
class OwnGenerator(GeneratorSource):
    """A generator of your own: the network that a function returns, with weights from a file.

    target: "package.module:function", which gets `latent` and `num_classes` if it has parameters of these names. The
    network takes latents (N, latent) from N(0, 1), then class numbers (N,) if `num_classes` is set, and returns images
    (N, C, H, W). path: its weights; empty if the function loads them.
    latent: the length of a latent. num_classes: of the labels that it takes; None: it takes none.
    output: its pixels are in [-1, 1] ("tanh") or in [0, 1] ("unit").
    """

    target: str
    latent: int
    path: str = ""
    num_classes: int | None = None
    output: Output = "tanh"

    def __post_init__(self) -> None:
        check_target(self.target)
        require_at_least(1, latent=self.latent, num_classes=self.num_classes)
        require_choice("output", self.output, get_args(Output))

    def read(self) -> Generator:
        network = built_by(self.target, {"latent": self.latent, "num_classes": self.num_classes})
        if self.path:
            load_weights(network, self.path)
        return _ready(network, self.latent, self.target, self.num_classes, self.output)


class DcganNetwork(nn.Module):
    """Latents (N, L) to images (N, C, H, W) in [-1, 1]: transposed convolutions, each doubles the sides.

    widths: the channels after each layer but the last. If the sides are not multiples of 2^len(widths), the centre is
    cropped.
    """

    def __init__(self, latent: int, widths: Sequence[int], inputs: Images) -> None:
        super().__init__()
        start = [math.ceil(side / 2 ** len(widths)) for side in inputs.shape[1:]]
        layers = [nn.ConvTranspose2d(latent, widths[0], (start[0], start[1]), bias=False), *_normed(widths[0])]
        for before, after in pairwise(widths):
            layers += [nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False), *_normed(after)]
        layers += [nn.ConvTranspose2d(widths[-1], inputs.channels, 4, stride=2, padding=1, bias=False), nn.Tanh()]
        self.main = nn.Sequential(*layers)
        self.size = inputs.shape[1:]

    def forward(self, latents: Tensor) -> Tensor:
        images: Tensor = self.main(latents[:, :, None, None])
        top, left = ((made - side) // 2 for made, side in zip(images.shape[2:], self.size, strict=True))
        return images[:, :, top : top + self.size[0], left : left + self.size[1]]


def _normed(width: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(width), nn.ReLU()]


class MlpNetwork(nn.Module):
    """Latents (N, L) to images (N, C, H, W) in [-1, 1] by linear layers of these sizes."""

    def __init__(self, sizes: Sequence[int], inputs: Images) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1], nn.Tanh())
        self.shape = inputs.shape

    def forward(self, latents: Tensor) -> Tensor:
        images: Tensor = self.layers(latents)
        return images.reshape(-1, *self.shape)


def _in_order(stored: Params) -> list[Tensor]:
    """The tensors, sorted by the numbers in their names, because safetensors files have another order."""
    return [stored[name] for name in sorted(stored, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])]


def _stored_shape(path: Path) -> Images | None:
    """The image shape in the metadata of the file, or None."""
    if path.suffix.lower() != ".safetensors":
        return None
    with safe_open(path, "pt") as file:
        shape = (file.metadata() or {}).get("shape")
    return None if shape is None else Images(*(int(side) for side in shape.split(",")))


def _ready(
    network: nn.Module, latent: int, what: str, num_classes: int | None = None, output: Output = "tanh"
) -> Generator:
    """The generator, after a test with two latents."""
    network = network.eval().requires_grad_(False)
    inputs = (torch.zeros(2, latent), *(() if num_classes is None else (torch.zeros(2, dtype=torch.long),)))
    wants = f"latents (N, {latent})" + ("" if num_classes is None else " and classes (N,)")
    with torch.no_grad():
        try:
            made = network(*inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(f"expected {what} to take {wants}, got an error: {reason(error)}; check latent") from error
    if not isinstance(made, Tensor) or made.ndim != 4 or len(made) != 2:
        got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ModelError(f"expected {what} to make images (2, C, H, W) of two latents, got {got}; return only images")
    return Generator(network, latent, Images(*made.shape[1:]), num_classes, output)
