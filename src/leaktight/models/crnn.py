"""The convolutional recurrent network for word recognition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leaktight.core.errors import ModelError, require_at_least
from leaktight.core.inputs import Images
from leaktight.core.kernels import quick_kernels
from leaktight.models.source import Network

_NORM_EPS, _NORM_MOMENTUM = 1e-3, 0.01  # Keras's values; PyTorch's momentum is 1 - Keras's


class BidirectionalLstm(nn.Module):
    """A bidirectional LSTM, (N, T, in_features) to (N, T, 2 * units), with gates in PyTorch's order.

    Computed step by step, because PyTorch's kernel does not support `vmap` in double precision; the kernel is used,
    with the same parameters, where `quick_kernels` allows it.
    """

    def __init__(self, in_features: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.weight_ih = nn.Parameter(torch.empty(2, 4 * units, in_features))
        self.weight_hh = nn.Parameter(torch.empty(2, 4 * units, units))
        self.bias = nn.Parameter(torch.zeros(2, 4 * units))
        for direction in range(2):
            nn.init.xavier_uniform_(self.weight_ih[direction])
            nn.init.orthogonal_(self.weight_hh[direction])
        nn.init.ones_(self.bias[:, units : 2 * units])  # the forget gate starts open, as in Keras

    def forward(self, inputs: Tensor) -> Tensor:
        return self._by_kernel(inputs) if quick_kernels() else self._step_by_step(inputs)

    def _by_kernel(self, inputs: Tensor) -> Tensor:
        unused = torch.zeros_like(self.bias[0])  # PyTorch's LSTM has a second bias
        weights = [
            tensor
            for direction in range(2)
            for tensor in (self.weight_ih[direction], self.weight_hh[direction], self.bias[direction], unused)
        ]
        start = inputs.new_zeros(2, len(inputs), self.units)
        # has_biases, num_layers, dropout, train, bidirectional, batch_first
        outputs, _, _ = torch.lstm(inputs, (start, start), weights, True, 1, 0.0, self.training, True, True)
        return outputs

    def _step_by_step(self, inputs: Tensor) -> Tensor:
        batch, steps, _ = inputs.shape
        both = torch.stack([inputs, inputs.flip(1)]).flatten(1, 2)
        projected = torch.baddbmm(self.bias[:, None], both, self.weight_ih.mT).view(2, batch, steps, 4 * self.units)
        hidden = cell = inputs.new_zeros(2, batch, self.units)
        states: list[Tensor] = []
        for step in projected.unbind(2):
            enter, forget, value, leave = (step + hidden @ self.weight_hh.mT).chunk(4, dim=-1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * value.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            states.append(hidden)
        forward, backward = torch.stack(states, dim=2).unbind(0)
        return torch.cat([forward, backward.flip(1)], dim=-1)


class ColumnReader(nn.Module):
    """Convolutions and two bidirectional LSTMs over the columns; log-probabilities of characters per column."""

    def __init__(self, normalize: nn.Module, inputs: Images, num_outputs: int, *, width: int, units: int) -> None:
        super().__init__()
        self.normalize = normalize
        self.features = nn.Sequential(
            *_convolution(inputs.channels, width),
            nn.MaxPool2d(2),
            *_convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *_convolution(2 * width, 4 * width, norm=True),
            *_convolution(4 * width, 4 * width),
            nn.ZeroPad2d((0, 1, 0, 0)),
            nn.MaxPool2d(2, stride=(2, 1)),
            *_convolution(4 * width, 8 * width, norm=True),
            *_convolution(8 * width, 8 * width),
            nn.ZeroPad2d((1, 1, 0, 0)),
            nn.MaxPool2d(2, stride=(2, 1)),
            *_convolution(8 * width, 8 * width, kernel=2),
        )
        self.norm = nn.BatchNorm1d(8 * width, eps=_NORM_EPS, momentum=_NORM_MOMENTUM)
        self.rnn = nn.Sequential(
            BidirectionalLstm(8 * width * (inputs.height // 16 - 1), units), BidirectionalLstm(2 * units, units)
        )
        self.classifier = nn.Linear(2 * units, num_outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.get_parameter("bias"))

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.features(self.normalize(inputs))
        # Three dimensions, not four: on the CPU the backward of BatchNorm2d is silently wrong for maps of height 1
        # whose gradient has the memory layout of this transposition (PyTorch 2.13).
        maps = self.norm(maps.flatten(2)).view_as(maps)
        columns = maps.flatten(1, 2).transpose(1, 2)
        outputs: Tensor = self.classifier(self.rnn(columns)).log_softmax(-1)
        return outputs


def _convolution(before: int, after: int, *, kernel: int = 3, norm: bool = False) -> Sequence[nn.Module]:
    """Convolution, ReLU and then batch norm."""
    padding = 1 if kernel == 3 else 0
    layers = [nn.Conv2d(before, after, kernel, padding=padding), nn.ReLU()]
    return [*layers, nn.BatchNorm2d(after, eps=_NORM_EPS, momentum=_NORM_MOMENTUM)] if norm else layers


@dataclass(frozen=True, kw_only=True)
class Crnn(Network):
    """CRNN for words (Shi et al. 2017), as in FedBoosting: log-probabilities (N, T, num_classes + 1), blank last.

    `num_classes` is the number of characters (36 letters and digits, so 37 outputs). 32x100 images give T = 25.
    width: channels of the first convolution; the last has eight times as many. units: of each LSTM.
    Differs from the paper: by default inputs are scaled to [-1, 1], as in the published code.
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    width: int = 64
    units: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, width=self.width, units=self.units)

    def network(self, inputs: Images, num_classes: int) -> nn.Module:
        if inputs.height < 32 or inputs.width < 8:
            raise ModelError(
                f"expected images of 32x8 or more for crnn, got {inputs.height}x{inputs.width}; "
                "scale words to a height of 32, as in the paper (32x100)"
            )
        return ColumnReader(
            self.normalizer(inputs.channels), inputs, num_classes + 1, width=self.width, units=self.units
        )
