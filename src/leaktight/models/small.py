"""The small networks of the leakage papers: convolutions, then linear layers, no batch norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from leaktight.core.errors import ModelError, require_at_least
from leaktight.core.inputs import Images
from leaktight.core.text import as_written
from leaktight.models.source import ACTIVATIONS, Activation, Network, num_features, require_choice


class FeedForward(nn.Module):
    """Normalisation, features, and a classifier of the flattened features."""

    def __init__(self, normalize: nn.Module, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.normalize = normalize
        self.features = features
        self.classifier = classifier

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(self.features(self.normalize(inputs)).flatten(1))
        return outputs


@dataclass(frozen=True, kw_only=True)
class LeNetZhu(Network):
    """LeNet of DLG: 3 or 4 convolutions of 12 channels, sigmoid, one linear layer (Zhu et al. 2019).

    activation: after each convolution.
    convolutions: 3 as in the published code of DLG, iDLG and Plato; 4 as in Soteria, CPL and OUTPOST's text.
    """

    convolutions: Literal[3, 4] = 3
    activation: Activation = "sigmoid"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("activation", self.activation, ACTIVATIONS)
        if self.convolutions not in (3, 4):
            raise ValueError(f"expected convolutions to be 3 or 4, got {self.convolutions}")

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        channels = inputs.channels
        for stride in (2, 2, 1, 1)[: self.convolutions]:
            layers += [nn.Conv2d(channels, 12, 5, stride=stride, padding=2), ACTIVATIONS[self.activation]()]
            channels = 12
        features = nn.Sequential(*layers)
        classifier = nn.Linear(num_features(features, inputs), num_classes)
        return FeedForward(self.normalizer(inputs.channels), features, classifier)


@dataclass(frozen=True, kw_only=True)
class GrnnLeNet(Network):
    """LeNet-5 with sigmoid and max-pooling, as attacked by GRNN (Ren et al. 2022).

    activation: after each hidden layer.
    """

    activation: Activation = "sigmoid"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("activation", self.activation, ACTIVATIONS)

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        act = ACTIVATIONS[self.activation]
        features = nn.Sequential(
            nn.Conv2d(inputs.channels, 6, 5), act(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), act(), nn.MaxPool2d(2)
        )
        sizes = (num_features(features, inputs), 120, 84)
        return FeedForward(self.normalizer(inputs.channels), features, _dense(sizes, num_classes, act))


@dataclass(frozen=True, kw_only=True)
class GlausCnn(Network):
    """Three unpadded 5x5 convolutions (10, 20, 10 channels), sigmoid, one linear layer: GLAUS's MNIST network.

    activation: after each convolution.
    """

    activation: Activation = "sigmoid"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("activation", self.activation, ACTIVATIONS)

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in pairwise((inputs.channels, 10, 20, 10)):
            layers += [nn.Conv2d(before, after, 5), ACTIVATIONS[self.activation]()]
        features = nn.Sequential(*layers)
        classifier = nn.Linear(num_features(features, inputs), num_classes)
        return FeedForward(self.normalizer(inputs.channels), features, classifier)


@dataclass(frozen=True, kw_only=True)
class Mlp(Network):
    """Linear layers only; by default two hidden layers of 200, the "2NN" of FedAvg (McMahan et al. 2017).

    hidden: the sizes of the hidden layers. activation: after each of them.
    Differs from the paper: LRP uses an MLP without giving its sizes; these are FedAvg's.
    """

    hidden: tuple[int, ...] = (200, 200)
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("activation", self.activation, ACTIVATIONS)
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(
                f"expected hidden to name at least one layer size >= 1, got {as_written(self.hidden)}; "
                "for none use logistic_regression"
            )

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        sizes = (inputs.size, *self.hidden)
        classifier = _dense(sizes, num_classes, ACTIVATIONS[self.activation])
        return FeedForward(self.normalizer(inputs.channels), nn.Identity(), classifier)


@dataclass(frozen=True, kw_only=True)
class LogisticRegression(Network):
    """One linear layer on the pixels."""

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        classifier = nn.Linear(inputs.size, num_classes)
        return FeedForward(self.normalizer(inputs.channels), nn.Identity(), classifier)


@dataclass(frozen=True, kw_only=True)
class ShallowCnn(Network):
    """Two padded 5x5 convolutions, each with 2x2 max-pooling, and a hidden layer: FedAvg's CNN (McMahan et al. 2017).

    channels: of the convolutions. hidden: units of the hidden layer. activation: after each of these layers.
    Differs from the paper: LRP uses a "shallow CNN" on MNIST without giving its sizes; these are FedAvg's.
    """

    channels: tuple[int, int] = (32, 64)
    hidden: int = 512
    activation: Activation = "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("activation", self.activation, ACTIVATIONS)
        if len(self.channels) != 2:
            raise ValueError(f"expected channels of 2 numbers, one per convolution, got {as_written(self.channels)}")
        require_at_least(1, channels=min(self.channels), hidden=self.hidden)

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        act = ACTIVATIONS[self.activation]
        layers: list[nn.Module] = []
        for before, after in pairwise((inputs.channels, *self.channels)):
            layers += [nn.Conv2d(before, after, 5, padding=2), act(), nn.MaxPool2d(2)]
        features = nn.Sequential(*layers)
        sizes = (num_features(features, inputs), self.hidden)
        return FeedForward(self.normalizer(inputs.channels), features, _dense(sizes, num_classes, act))


@dataclass(frozen=True, kw_only=True)
class Cnn6(Network):
    """Six bias-free convolutions with leaky ReLU and one bias-free linear layer (R-GAP, Zhu and Blaschko 2021).

    head: "logistic" is the paper's single output u for two classes, given as the logits (0, u), whose cross-entropy is
    the logistic loss of u with the labels -1 (class 0) and +1 (class 1). "linear" has a bias and one output per class.
    """

    head: Literal["logistic", "linear"] = "logistic"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("head", self.head, _HEADS)

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        channels = inputs.channels
        for out, kernel, stride, padding in _CNN6_CONVOLUTIONS:
            convolution = nn.Conv2d(channels, out, kernel, stride=stride, padding=padding, bias=False)
            layers += [convolution, nn.LeakyReLU(0.2)]
            channels = out
        features = nn.Sequential(*layers)
        classifier = _HEADS[self.head](num_features(features, inputs), num_classes)
        return FeedForward(self.normalizer(inputs.channels), features, classifier)


class LogisticHead(nn.Module):
    """One output u for two classes, as the logits (0, u)."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        if num_classes != 2:
            raise ModelError(f'expected 2 classes for cnn6 with head="logistic", got {num_classes}; set head="linear"')
        self.linear = nn.Linear(in_features, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.linear(inputs)
        return torch.cat([torch.zeros_like(output), output], dim=1)


_CNN6_CONVOLUTIONS = ((12, 4, 2, 2), (36, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1))

_HEADS: Mapping[str, type[nn.Module]] = {"logistic": LogisticHead, "linear": nn.Linear}


def _dense(sizes: tuple[int, ...], num_classes: int, activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers through `sizes` with an activation after each, then one to the classes."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], num_classes))
