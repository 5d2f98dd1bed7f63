"""Residual networks: ResNet-18/34/50/152, ResNet20-4, and the narrow ones for CIFAR (20, 32, 56 layers).

Parameters bear the names of the published weights: torchvision's for the wide networks (`fc` at the end), those of
Idelbayev's CIFAR checkpoints for the narrow ones (`linear` at the end).
Reference: He et al., Deep residual learning for image recognition, CVPR 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from leaktight.core.inputs import Images
from leaktight.models.source import ACTIVATIONS, Activation, Network, require_choice


class Stem(NamedTuple):
    """The first convolution, whether a 3x3 max-pool of stride 2 follows, and how convolutions are initialised."""

    kernel: int
    stride: int
    max_pool: bool
    kaiming: bool


STEMS: Mapping[str, Stem] = {
    "cifar": Stem(kernel=3, stride=1, max_pool=False, kaiming=True),
    "imagenet": Stem(kernel=7, stride=2, max_pool=True, kaiming=True),
    "grnn": Stem(kernel=3, stride=1, max_pool=False, kaiming=False),
    "fedkl": Stem(kernel=7, stride=2, max_pool=False, kaiming=False),
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut; the activation also follows the sum."""

    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int, activation: type[nn.Module], shortcut: nn.Module):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut
        self.act = activation()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.act(self.bn1(self.conv1(inputs)))
        outputs: Tensor = self.act(self.bn2(self.conv2(hidden)) + self.downsample(inputs))
        return outputs


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride, as in the published weights), 1x1 to four times the width."""

    expansion: ClassVar[int] = 4

    def __init__(self, channels: int, width: int, stride: int, activation: type[nn.Module], shortcut: nn.Module):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = shortcut
        self.act = activation()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.act(self.bn1(self.conv1(inputs)))
        hidden = self.act(self.bn2(self.conv2(hidden)))
        outputs: Tensor = self.act(self.bn3(self.conv3(hidden)) + self.downsample(inputs))
        return outputs


class PaddedShortcut(nn.Module):
    """The parameter-free shortcut ("option A"): every second pixel, and zeros for the channels that are new."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (width - channels) // 2
        self.after = width - channels - self.before

    def forward(self, inputs: Tensor) -> Tensor:
        return F.pad(inputs[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


def _projection(channels: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))


class Plan(NamedTuple):
    """What distinguishes one residual network from another. `head` is the name of the linear layer at the end."""

    stem: Stem
    depths: Sequence[int]
    widths: Sequence[int]
    activation: type[nn.Module]
    block: type[BasicBlock] | type[Bottleneck] = BasicBlock
    shortcut: Callable[[int, int, int], nn.Module] = _projection
    head: str = "fc"


class ResNet(nn.Module):
    """Stem, stages, mean over the pixels, linear layer, registered in forward order."""

    def __init__(self, normalize: nn.Module, channels: int, num_classes: int, plan: Plan) -> None:
        super().__init__()
        stem, width = plan.stem, plan.widths[0]
        self.normalize = normalize
        self.conv1 = nn.Conv2d(channels, width, stem.kernel, stem.stride, padding=stem.kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act = plan.activation()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stem.max_pool else nn.Identity()
        self.stages = [f"layer{place + 1}" for place in range(len(plan.depths))]
        for place, name in enumerate(self.stages):
            stage, width = _stage(plan, place, width)
            self.add_module(name, stage)
        self.head = plan.head
        self.add_module(plan.head, nn.Linear(width, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.maxpool(self.act(self.bn1(self.conv1(self.normalize(inputs)))))
        for name in self.stages:
            hidden = self.get_submodule(name)(hidden)
        outputs: Tensor = self.get_submodule(self.head)(hidden.mean((2, 3)))
        return outputs


def _stage(plan: Plan, place: int, channels: int) -> tuple[nn.Sequential, int]:
    """The blocks of one stage, and how many channels they give. Every stage but the first halves the image."""
    blocks: list[nn.Module] = []
    width = plan.widths[place]
    after = width * plan.block.expansion
    for index in range(plan.depths[place]):
        stride = 2 if place and not index else 1
        same = stride == 1 and channels == after
        shortcut = nn.Identity() if same else plan.shortcut(channels, after, stride)
        blocks.append(plan.block(channels, width, stride, plan.activation, shortcut))
        channels = after
    return nn.Sequential(*blocks), after


def _kaiming(model: nn.Module, kinds: tuple[type[nn.Module], ...], mode: Literal["fan_in", "fan_out"]) -> None:
    for module in model.modules():
        if isinstance(module, kinds):
            nn.init.kaiming_normal_(module.get_parameter("weight"), mode=mode, nonlinearity="relu")


@dataclass(frozen=True, kw_only=True)
class ResNetSettings(Network):
    """What the wide residual networks share.

    stem: "cifar": 3x3 of stride 1; "imagenet": 7x7 of stride 2 and max-pooling, as the published weights need;
        "grnn" and "fedkl": the leakage studies' own, 3x3 and 7x7 without max-pooling, with PyTorch's initialisation
        in place of He's. Use these two with activation="sigmoid".
    activation: in place of every ReLU, also after the residual sums.
    """

    block: ClassVar[type[BasicBlock] | type[Bottleneck]] = BasicBlock
    depths: ClassVar[tuple[int, ...]]
    widths: ClassVar[tuple[int, ...]] = (64, 128, 256, 512)

    stem: Literal["cifar", "imagenet", "grnn", "fedkl"] = "cifar"
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("stem", self.stem, STEMS)
        require_choice("activation", self.activation, ACTIVATIONS)

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        plan = Plan(STEMS[self.stem], self.depths, self.widths, ACTIVATIONS[self.activation], self.block)
        model = ResNet(self.normalizer(inputs.channels), inputs.channels, num_classes, plan)
        if plan.stem.kaiming:
            _kaiming(model, (nn.Conv2d,), "fan_out")
        return model


@dataclass(frozen=True, kw_only=True)
class ResNet18(ResNetSettings):
    """ResNet-18; stem for CIFAR, ImageNet or a leakage study."""

    depths: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)


@dataclass(frozen=True, kw_only=True)
class ResNet34(ResNetSettings):
    """ResNet-34; stem for CIFAR, ImageNet or a leakage study."""

    depths: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


@dataclass(frozen=True, kw_only=True)
class ResNet50(ResNetSettings):
    """ResNet-50; stem for CIFAR, ImageNet or a leakage study."""

    block: ClassVar[type[BasicBlock] | type[Bottleneck]] = Bottleneck
    depths: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


@dataclass(frozen=True, kw_only=True)
class ResNet152(ResNetSettings):
    """ResNet-152; stem for CIFAR, ImageNet or a leakage study."""

    block: ClassVar[type[BasicBlock] | type[Bottleneck]] = Bottleneck
    depths: ClassVar[tuple[int, ...]] = (3, 8, 36, 3)


@dataclass(frozen=True, kw_only=True)
class ResNet20x4(ResNetSettings):
    """ResNet20-4, four times as wide as ResNet-20, with projections (Inverting Gradients, AGIC): 21 convolutions."""

    depths: ClassVar[tuple[int, ...]] = (3, 3, 3)
    widths: ClassVar[tuple[int, ...]] = (64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class CifarResNetSettings(Network):
    """What the narrow residual networks share: widths 16, 32, 64, parameter-free shortcuts.

    activation: "sigmoid" in leakage studies, in place of every ReLU.
    """

    depth: ClassVar[int]

    activation: Activation = "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("activation", self.activation, ACTIVATIONS)

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        plan = Plan(
            STEMS["cifar"],
            depths=(self.depth,) * 3,
            widths=(16, 32, 64),
            activation=ACTIVATIONS[self.activation],
            shortcut=PaddedShortcut,
            head="linear",
        )
        model = ResNet(self.normalizer(inputs.channels), inputs.channels, num_classes, plan)
        _kaiming(model, (nn.Conv2d, nn.Linear), "fan_in")
        return model


@dataclass(frozen=True, kw_only=True)
class ResNet20(CifarResNetSettings):
    """ResNet-20 for CIFAR, with parameter-free shortcuts."""

    depth: ClassVar[int] = 3


@dataclass(frozen=True, kw_only=True)
class ResNet32(CifarResNetSettings):
    """ResNet-32 for CIFAR, with parameter-free shortcuts."""

    depth: ClassVar[int] = 5


@dataclass(frozen=True, kw_only=True)
class ResNet56(CifarResNetSettings):
    """ResNet-56 for CIFAR, with parameter-free shortcuts."""

    depth: ClassVar[int] = 9
