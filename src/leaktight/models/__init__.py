"""Networks to attack. Settings build a network; it normalises its inputs itself."""

from __future__ import annotations

from collections.abc import Mapping

from leaktight.models.crnn import Crnn
from leaktight.models.initialise import build_model, initialise_wide, load_weights
from leaktight.models.resnet import (
    ResNet18,
    ResNet20,
    ResNet20x4,
    ResNet32,
    ResNet34,
    ResNet50,
    ResNet56,
    ResNet152,
)
from leaktight.models.small import Cnn6, GlausCnn, GrnnLeNet, LeNetZhu, LogisticRegression, Mlp, ShallowCnn
from leaktight.models.source import IMAGENET_MEAN, IMAGENET_STD, ModelSource, Network, Normalize, check_fits
from leaktight.models.surgery import (
    ConvBlock,
    batch_statistics,
    conv_bn_blocks,
    final_linear,
    has_batch_norm,
    mode_of,
    representation,
)
from leaktight.models.user import UserModel
from leaktight.models.vgg import Vgg16
from leaktight.models.vit import Vit

MODELS: Mapping[str, type[Network]] = {
    "lenet_zhu": LeNetZhu,
    "grnn_lenet": GrnnLeNet,
    "glaus_cnn": GlausCnn,
    "mlp": Mlp,
    "logistic_regression": LogisticRegression,
    "shallow_cnn": ShallowCnn,
    "resnet20": ResNet20,
    "resnet32": ResNet32,
    "resnet56": ResNet56,
    "resnet20_4": ResNet20x4,
    "resnet18": ResNet18,
    "resnet34": ResNet34,
    "resnet50": ResNet50,
    "resnet152": ResNet152,
    "vgg16": Vgg16,
    "vit": Vit,
    "cnn6": Cnn6,
    "crnn": Crnn,
}
"""The catalogue of networks. A user's own network is a `UserModel`."""

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "MODELS",
    "ConvBlock",
    "ModelSource",
    "Network",
    "Normalize",
    "UserModel",
    "batch_statistics",
    "build_model",
    "check_fits",
    "conv_bn_blocks",
    "final_linear",
    "has_batch_norm",
    "initialise_wide",
    "load_weights",
    "mode_of",
    "representation",
]
