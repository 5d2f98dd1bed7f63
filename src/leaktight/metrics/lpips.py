"""LPIPS: the distance of two images in the feature maps of a trained network, weighted by human judgements.

It needs two sets of published weights. The heads (LPIPS v0.1) come with torchmetrics. The ImageNet trunk must be in the
data root or in its folder `lpips_trunks/`; without it the metric is unavailable.
"""

from __future__ import annotations

import importlib.util
import math
import pickle
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaktight.core.devices import moved
from leaktight.core.errors import UsageError, suggestion
from leaktight.core.protocols import Metric
from leaktight.metrics.image import image_pair
from leaktight.metrics.spec import LeaksWhen, MetricUnavailable

# The mean and standard deviation of ImageNet, for images in [-1, 1], as LPIPS rounds them.
_SHIFT = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
_SCALE = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)
_CHUNK = 32


class LpipsUnavailable(MetricUnavailable):
    """The weights of LPIPS are missing or invalid."""


class _Conv(NamedTuple):
    """A convolution with its ReLU."""

    channels: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1


class _Pool(NamedTuple):
    kernel: int
    stride: int = 2


class _Trunk(NamedTuple):
    """taps: indices of the layers whose outputs are compared. min_side: of the smallest image that reaches the last."""

    files: tuple[str, ...]
    layers: tuple[_Conv | _Pool, ...]
    taps: tuple[int, ...]
    min_side: int

    def build(self) -> nn.Sequential:
        """The network without weights, on the meta device, which draws no random numbers."""
        modules: list[nn.Module] = []
        channels = 3
        with torch.device("meta"):
            for layer in self.layers:
                if isinstance(layer, _Pool):
                    modules.append(nn.MaxPool2d(layer.kernel, layer.stride))
                else:
                    modules += [
                        nn.Conv2d(channels, layer.channels, layer.kernel, layer.stride, layer.padding),
                        nn.ReLU(),
                    ]
                    channels = layer.channels
        return nn.Sequential(*modules)


_TRUNKS = {
    "alex": _Trunk(
        files=("alexnet_features.pth", "alexnet-owt-7be5be79.pth"),
        layers=(
            *(_Conv(64, kernel=11, stride=4, padding=2), _Pool(3)),
            *(_Conv(192, kernel=5, padding=2), _Pool(3)),
            *(_Conv(384), _Conv(256), _Conv(256)),
        ),
        taps=(1, 4, 7, 9, 11),
        min_side=31,
    ),
    "vgg": _Trunk(
        files=("vgg16_features.pth", "vgg16-397923af.pth"),
        layers=(
            *(_Conv(64), _Conv(64), _Pool(2)),
            *(_Conv(128), _Conv(128), _Pool(2)),
            *(_Conv(256), _Conv(256), _Conv(256), _Pool(2)),
            *(_Conv(512), _Conv(512), _Conv(512), _Pool(2)),
            *(_Conv(512), _Conv(512), _Conv(512)),
        ),
        taps=(3, 8, 15, 22, 29),
        min_side=16,
    ),
}


class _Network(NamedTuple):
    trunk: nn.Sequential
    heads: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Lpips(Metric):
    """LPIPS v0.1 with the trunk of AlexNet or VGG16: 0 for identical images, larger for less alike ones.

    net: "alex" or "vgg". root: the data root, which holds `alexnet_features.pth` or `vgg16_features.pth` (only
    convolutions) or torchvision's files, in `lpips_trunks/` or directly.

    Images are clamped to [0, 1], mapped to [-1, 1] and scaled by LPIPS's layer; one channel is repeated to three. Only
    an image with a side below the trunk's minimum (31 pixels for AlexNet, 16 for VGG16) is resized: enlarged bilinearly
    to
    it, with its proportions. Scores depend on the image size, so compare only images of the same size. At 32 x 32
    pixels AlexNet discriminates little: the distance of unrelated CIFAR-10 images is 0.2, and so is that of an image
    and its blur of 5 x 5 pixels; VGG16 gives 0.65 and 0.32.

    Reference: Zhang, Isola, Efros, Shechtman, Wang, The Unreasonable Effectiveness of Deep Features as a Perceptual
    Metric, CVPR 2018.
    """

    root: Path
    net: Literal["alex", "vgg"] = "alex"
    name: str = field(init=False)
    leaks_when: LeaksWhen = field(default="low", init=False)

    def __post_init__(self) -> None:
        if self.net not in _TRUNKS:
            raise ValueError(f"expected net 'alex' or 'vgg', got {self.net!r}; {suggestion(self.net, _TRUNKS)}")
        object.__setattr__(self, "name", f"lpips_{self.net}")

    def available(self) -> str | None:
        """None if the metric can be computed, else the reason why not. Reads the weights."""
        try:
            _ = self._network
        except LpipsUnavailable as error:
            return str(error)
        return None

    def __call__(self, guess: Tensor, truth: Tensor) -> Tensor:
        network = moved(self._network, guess.device)
        inputs = [moved(self._inputs(images), guess.device) for images in image_pair(guess, truth)]
        pairs = zip(*(images.split(_CHUNK) for images in inputs), strict=True)
        return torch.cat([self._distance(network, *pair) for pair in pairs]).cpu().double()

    @cached_property
    def _network(self) -> _Network:
        parts = _TRUNKS[self.net]
        path = _find_trunk(self.root, parts.files)
        saved = _read(path)
        weights = {name.removeprefix("features."): saved[name] for name in saved if name.startswith("features.")}
        trunk = parts.build()
        try:
            trunk.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            reason = f"expected the convolutions of {self.net} in {path}, got others: {_line(error)}"
            raise LpipsUnavailable(reason) from error
        heads = _read(_head_file(self.net))
        by_tap = tuple(heads[f"lin{place}.model.1.weight"] for place in range(len(parts.taps)))
        return _Network(trunk.requires_grad_(False).eval(), by_tap)

    def _inputs(self, images: Tensor) -> Tensor:
        """Images in [0, 1] as inputs of the trunk: three channels, at least the minimum size, scaled."""
        channels, *sides = images.shape[1:]
        if channels not in (1, 3):
            raise UsageError(f"expected images of 1 or 3 channels for LPIPS, got {channels}")
        images = images.to(torch.float32).expand(-1, 3, -1, -1)
        min_side = _TRUNKS[self.net].min_side
        if min(sides) < min_side:
            size = [math.ceil(side * min_side / min(sides)) for side in sides]
            images = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
        return (2 * images - 1 - _SHIFT) / _SCALE

    @torch.no_grad()
    def _distance(self, network: _Network, guess: Tensor, truth: Tensor) -> Tensor:
        trunk, heads = network
        weights = dict(zip(_TRUNKS[self.net].taps, heads, strict=True))
        total = guess.new_zeros(len(guess))
        for place, layer in enumerate(trunk):
            guess, truth = layer(guess), layer(truth)
            if place in weights:
                gap = (_unit(guess) - _unit(truth)).square()
                total = total + (gap * weights[place]).sum(1).mean((1, 2))
        return total


def _unit(features: Tensor) -> Tensor:
    """Features with the channels of each position scaled to norm 1; zeros stay zeros."""
    return features / (features.square().sum(1, keepdim=True).sqrt() + 1e-10)


def _find_trunk(root: Path, names: tuple[str, ...]) -> Path:
    for folder in (root / "lpips_trunks", root):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise LpipsUnavailable(
        f"expected {' or '.join(names)} in {root / 'lpips_trunks'}, found neither; put torchvision's file there"
    )


def _head_file(net: str) -> Path:
    # find_spec does not import torchmetrics, which takes seconds.
    spec = importlib.util.find_spec("torchmetrics")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    for folder in folders:
        path = Path(folder, "functional", "image", "lpips_models", f"{net}.pth")
        if path.is_file():
            return path
    raise LpipsUnavailable(f"expected torchmetrics with its file lpips_models/{net}.pth, found none; reinstall it")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise LpipsUnavailable(f"expected weights in {path}, could not read them: {_line(error)}") from error
    if not isinstance(saved, dict):
        raise LpipsUnavailable(f"expected weights by name in {path}, got a {type(saved).__name__}")
    return saved


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
