"""Linear equations for the input of convolutions: their weights' gradients, given the gradients at their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leaktight.attacks.exact.rank_analysis import gradient_matrix

_RANK = 1e-5  # singular values below this, relative to the largest, leave a direction open
_ERRORS = 0.8, 300.0  # the limit between errors and values is between these times the largest error below zero


@dataclass(frozen=True)
class Fit:
    """A solution by least squares.

    flat: (unknowns, channels). openings: (k, unknowns), directions that are left open. spread: (unknowns,), the
    standard deviation of a solution up to a factor. channels: the relative residual of each output channel that was
    used. residual: that of all.
    """

    flat: Tensor
    openings: Tensor
    spread: Tensor
    channels: Tensor
    residual: float


@dataclass(frozen=True)
class Equations:
    """matrix (rows, unknowns) @ x = goal (rows, channels); the unknowns are the positions of all examples.

    channel: (rows,), the output channel that a row belongs to, counted over all convolutions.
    """

    matrix: Tensor
    goal: Tensor
    channel: Tensor

    @classmethod
    def of(
        cls, layers: Sequence[nn.Conv2d], slopes: Sequence[Tensor], signals: Sequence[Tensor], size: Sequence[int]
    ) -> Equations:
        """slopes: gradients of the weights. signals: those at the outputs, (N, C, h, w). size: H, W of the input."""
        parts = [
            torch.cat([gradient_matrix(layer, one, size) for one in signal], 1)
            for layer, signal in zip(layers, signals, strict=True)
        ]
        matrix = torch.cat(parts)
        goal = torch.cat([slope.permute(0, 2, 3, 1).flatten(0, 2) for slope in slopes])
        lengths = matrix.norm(dim=1, keepdim=True)
        lengths = lengths.clamp_min(1e-9 * float(lengths.max()) + 1e-300)  # rounding is relative to the row
        taps = torch.tensor([slope.shape[2:].numel() for slope in slopes for _ in slope])
        return cls(matrix / lengths, goal / lengths, torch.repeat_interleave(torch.arange(len(taps)), taps))

    def fit(self, used: Tensor | None = None) -> Fit | None:
        """The solution by the rows of the output channels `used` (all: None); None if they say nothing."""
        rows = torch.ones_like(self.channel, dtype=torch.bool) if used is None else used[self.channel]
        matrix, goal = self.matrix[rows], self.goal[rows]
        if not bool(matrix.any()) or not bool(torch.isfinite(matrix).all()):
            return None
        left, sizes, turn = torch.linalg.svd(matrix, full_matrices=len(matrix) < matrix.shape[1])
        rank = int((sizes > _RANK * sizes[0]).sum())
        inverse = turn[:rank].T / sizes[:rank]
        flat = inverse @ (left[:, :rank].T @ goal)
        rest, size = ((each**2).sum(1) for each in (matrix @ flat - goal, goal))
        number = int(self.channel.max()) + 1
        by_channel = [
            torch.zeros(number, dtype=each.dtype).index_add_(0, self.channel[rows], each) for each in (rest, size)
        ]
        shares = (by_channel[0] / by_channel[1].clamp_min(1e-300)).sqrt()
        residual = float((rest.sum() / size.sum().clamp_min(1e-300)).sqrt())
        spread = inverse.norm(dim=1)
        return Fit(flat, turn[rank:], spread.clamp_min(1e-3 * float(spread.max())), shares, residual)


def channels_first(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """(N x H x W, channels) as (N, channels, H, W)."""
    return flat.reshape(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2).contiguous()


def let_through(value: Tensor, spread: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """What a ReLU lets through, and how safe that is for each entry: 0 at the limit, larger away from it.

    spread: how the errors of entries compare. Negative entries are errors alone, and show how large these are; the
    limit is where there are fewest entries above them.
    """
    sizes = value / spread
    error = max(-float(sizes.min()), 1e-12 * float(sizes.max()))
    low, high = (each * error for each in _ERRORS)
    near = sizes[(sizes > low) & (sizes < high)].sort().values
    steps = torch.cat([near.new_tensor([low]), near, near.new_tensor([high])]).log()
    widest = int(steps.diff().argmax())
    above = sizes.clamp_min(1e-300).log() - steps[widest : widest + 2].mean()
    return torch.where(above > 0, value, 0.0), above.abs()
