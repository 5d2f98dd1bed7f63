"""VGG-16 with torchvision's parameter names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from leaktight.core.inputs import Images
from leaktight.models.source import ACTIVATIONS, Activation, Network, num_features, require_choice

_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Vgg(nn.Module):
    """3x3 convolutions with max-pooling after each group, average pooling to 7x7, three linear layers."""

    def __init__(
        self, normalize: nn.Module, channels: int, num_classes: int, activation: type[nn.Module], dropout: float
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for group in _WIDTHS:
            for width in group:
                layers += [nn.Conv2d(channels, width, 3, padding=1), activation()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.normalize = normalize
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(channels * 7 * 7, 4096),
            activation(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            activation(),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.get_parameter("bias"))
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.avgpool(self.features(self.normalize(inputs)))
        outputs: Tensor = self.classifier(hidden.flatten(1))
        return outputs


@dataclass(frozen=True, kw_only=True)
class Vgg16(Network):
    """VGG-16 without batch norm (Simonyan and Zisserman 2015), for images of 32x32 and more.

    activation: "sigmoid" in leakage studies, in place of every ReLU. dropout: of the hidden linear layers.
    """

    activation: Activation = "relu"
    dropout: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("activation", self.activation, ACTIVATIONS)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {self.dropout}")

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        num_features(nn.Sequential(*[nn.MaxPool2d(2)] * len(_WIDTHS)), inputs)  # five halvings must leave a pixel
        normalize = self.normalizer(inputs.channels)
        return Vgg(normalize, inputs.channels, num_classes, ACTIVATIONS[self.activation], self.dropout)
