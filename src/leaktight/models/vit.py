"""A plain vision transformer with torchvision's parameter names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leaktight.core.errors import ModelError, require_at_least
from leaktight.core.inputs import Images
from leaktight.models.source import Network


class SelfAttention(nn.Module):
    """Multi-head attention without fused kernels, which have no second derivative."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        projected = nn.functional.linear(inputs, self.in_proj_weight, self.in_proj_bias)
        # (N, tokens, 3 * width) -> three of (N, heads, tokens, width / heads)
        split = projected.reshape(*projected.shape[:2], 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        outputs: Tensor = self.out_proj(mixed)
        return outputs


class EncoderLayer(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm and around a shortcut."""

    def __init__(self, width: int, heads: int, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = SelfAttention(width, heads)
        self.dropout = nn.Dropout(dropout)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_width, width),
            nn.Dropout(dropout),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.dropout(self.self_attention(self.ln_1(inputs)))
        outputs: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return outputs


class Encoder(nn.Module):
    """Position embedding, layers, layer norm."""

    def __init__(self, tokens: int, settings: Vit) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, settings.width))
        self.dropout = nn.Dropout(settings.dropout)
        self.layers = nn.Sequential()
        for place in range(settings.depth):
            layer = EncoderLayer(settings.width, settings.heads, settings.mlp_width, settings.dropout)
            self.layers.add_module(f"encoder_layer_{place}", layer)
        self.ln = nn.LayerNorm(settings.width, eps=1e-6)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.ln(self.layers(self.dropout(inputs + self.pos_embedding)))
        return outputs


class VisionTransformer(nn.Module):
    """Patches and a class token through the encoder; a linear layer reads the class token."""

    def __init__(self, normalize: nn.Module, inputs: Images, num_classes: int, settings: Vit) -> None:
        super().__init__()
        patch = settings.patch_size
        self.normalize = normalize
        self.class_token = nn.Parameter(torch.empty(1, 1, settings.width))
        self.conv_proj = nn.Conv2d(inputs.channels, settings.width, patch, stride=patch)
        self.encoder = Encoder(1 + (inputs.height // patch) * (inputs.width // patch), settings)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(settings.width, num_classes))
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif ".ln" not in name:
                nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        patches = self.conv_proj(self.normalize(inputs)).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], dim=1)
        outputs: Tensor = self.heads(self.encoder(tokens)[:, 0])
        return outputs


@dataclass(frozen=True, kw_only=True)
class Vit(Network):
    """A plain vision transformer, small by default (Dosovitskiy et al. 2021).

    patch_size: pixels per side. depth: of blocks. width: of a token. heads: of the attention.
    mlp_width: hidden units of a block's MLP. dropout: in the blocks.

    ViT-B/16 is patch_size 16, depth 12, width 768, heads 12, mlp_width 3072. Weights start from a normal distribution
    of deviation 0.02, biases from 0, as in Hugging Face's ViT, which OUTPOST attacks.
    """

    patch_size: int = 4
    depth: int = 6
    width: int = 192
    heads: int = 3
    mlp_width: int = 768
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(
            1,
            patch_size=self.patch_size,
            depth=self.depth,
            width=self.width,
            heads=self.heads,
            mlp_width=self.mlp_width,
        )
        if self.width % self.heads:
            raise ValueError(f"expected width to be a multiple of heads, got width {self.width}, heads {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {self.dropout}")

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        if inputs.height % self.patch_size or inputs.width % self.patch_size:
            raise ModelError(
                f"expected images whose sides are multiples of patch_size {self.patch_size}, "
                f"got {inputs.height}x{inputs.width}; set a patch_size that divides both"
            )
        return VisionTransformer(self.normalizer(inputs.channels), inputs, num_classes, self)
