"""Penalties on unlikely images, as pure functions of tensors.

Images are (N, C, H, W) in [0, 1]. Papers that normalise pixels outside the network have 1 / std (about 4) times larger
differences; multiply their weights of total variation by that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leaktight.attacks.matching.batch_norm import statistics_of
from leaktight.core.errors import ModelError, UsageError, require_above, require_at_least
from leaktight.core.text import sides
from leaktight.core.types import Params
from leaktight.models.source import require_choice
from leaktight.models.surgery import layer_inputs

_EPSILON = 1e-8  # keeps roots differentiable where neighbouring pixels are equal


@dataclass(frozen=True, kw_only=True)
class ImagePrior(ABC):
    """A penalty on the images alone."""

    @abstractmethod
    def penalty(self, images: Tensor) -> Tensor:
        """How unlikely the images are, a 0-d tensor."""


@dataclass(frozen=True, kw_only=True)
class SameInEveryPart(ImagePrior):
    """The squared distance between the mean images of equal parts of the batch, which does not depend on their order.

    parts: how many, >= 1.
    Reference: Dimitrov et al., Data Leakage in Federated Averaging, TMLR 2022 (the prior over epochs, with the mean).
    """

    parts: int

    def __post_init__(self) -> None:
        require_at_least(1, parts=self.parts)

    def penalty(self, images: Tensor) -> Tensor:
        means = images.reshape(self.parts, -1, *images.shape[1:]).mean(1)
        return (means - means.mean(0)).square().mean()


VariationForm: TypeAlias = Literal["absolute_mean", "squared", "isotropic", "double_opponent"]


@dataclass(frozen=True, kw_only=True)
class TotalVariation(ImagePrior):
    """How much neighbouring pixels differ.

    form: "absolute_mean", mean |dx| + mean |dy| (Inverting Gradients);
        "squared", 2 (mean dx^2 + mean dy^2) (GRNN's code);
        "isotropic", the mean of (dx^2 + dy^2)^(1/2);
        "double_opponent", the mean of (|dx|^p + |dy|^p)^q over the channels and, for colour images, red - green,
        red - blue and green - blue (Fishing, with p = 2 and q = 0.5).
    p, q: the exponents of "double_opponent", > 0.
    Differs from published code: the difference beyond the last row and column is zero; there the image is surrounded by
    black.
    """

    form: VariationForm = "absolute_mean"
    p: float = 2.0
    q: float = 0.5

    def __post_init__(self) -> None:
        require_choice("form", self.form, _FORMS)
        require_above(0, p=self.p, q=self.q)

    def penalty(self, images: Tensor) -> Tensor:
        if images.ndim != 4 or min(images.shape[2:]) < 2:
            raise UsageError(f"expected images (N, C, H, W) of at least 2x2 pixels, got {sides(images.shape)}")
        return _FORMS[self.form](images, self)


def _differences(images: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of neighbouring pixels: along rows (N, C, H, W - 1), along columns (N, C, H - 1, W)."""
    return images[..., :, 1:] - images[..., :, :-1], images[..., 1:, :] - images[..., :-1, :]


def _padded_differences(images: Tensor) -> tuple[Tensor, Tensor]:
    """The same, both (N, C, H, W), with zeros at the last column and row."""
    across, down = _differences(images)
    return nn.functional.pad(across, (0, 1)), nn.functional.pad(down, (0, 0, 0, 1))


def _absolute_mean(images: Tensor, settings: TotalVariation) -> Tensor:
    across, down = _differences(images)
    return across.abs().mean() + down.abs().mean()


def _squared(images: Tensor, settings: TotalVariation) -> Tensor:
    across, down = _differences(images)
    return 2 * (across.square().mean() + down.square().mean())


def _isotropic(images: Tensor, settings: TotalVariation) -> Tensor:
    across, down = _padded_differences(images)
    return (across.square() + down.square() + _EPSILON**2).sqrt().mean()


def _double_opponent(images: Tensor, settings: TotalVariation) -> Tensor:
    if images.shape[1] == 3:
        red, green, blue = images.unbind(1)
        opponents = torch.stack([red - green, red - blue, green - blue], 1)
        images = torch.cat([images, opponents], 1)
    powers = [(difference.abs() + _EPSILON) ** settings.p for difference in _padded_differences(images)]
    return ((powers[0] + powers[1]) ** settings.q).mean()


_FORMS: Mapping[str, Callable[[Tensor, TotalVariation], Tensor]] = {
    "absolute_mean": _absolute_mean,
    "squared": _squared,
    "isotropic": _isotropic,
    "double_opponent": _double_opponent,
}


@dataclass(frozen=True, kw_only=True)
class L2Norm(ImagePrior):
    """Half the mean square of the normalised pixels, (x - centre) / spread.

    GradInversion normalises images outside the network; here they are in [0, 1], and the defaults do the same.
    centre=0, spread=1 is the mean square of the pixels.
    Reference: Yin et al., See through Gradients, CVPR 2021.
    """

    centre: float = 0.5
    spread: float = 0.25

    def __post_init__(self) -> None:
        if not math.isfinite(self.centre):
            raise ValueError(f"expected a finite centre, got {self.centre}")
        require_above(0, spread=self.spread)

    def penalty(self, images: Tensor) -> Tensor:
        return 0.5 * ((images - self.centre) / self.spread).square().mean()


@dataclass(frozen=True, kw_only=True)
class GroupConsistency:
    """The distance of images from the consensus of several restarts: |x - consensus|_2 / (H W).

    Reference: Yin et al., See through Gradients, CVPR 2021.
    Differs from the paper: restarts are registered by shifts (`registration.py`), not by a flow.
    """

    def penalty(self, images: Tensor, consensus: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        return _norm(images - consensus) / (height * width)


BatchNormForm: TypeAlias = Literal["norms", "relative"]


@dataclass(frozen=True, kw_only=True)
class BatchNormStatistics:
    """The distance of the guess's statistics from known ones, over the batch-norm layers.

    Known are those of the client's batch where it sent its buffers, else the running ones, an estimate.
    form: "norms", the sum of |mean - known|_2 + |variance - known|_2 of the layer's inputs, by channel;
        "relative", the mean over layers and channels of (mean - known)^2 / variance + ((variance - known) / (2
        variance))^2, with the known variance below the line, which no layer dominates.
    first_layer_weight: the factor of the layer that runs first, >= 0.
    estimated: use the running statistics where none were sent; else the penalty is then zero.
    Reference: Yin et al., See through Gradients, CVPR 2021, for "norms" with running statistics.
    """

    form: BatchNormForm = "norms"
    first_layer_weight: float = 10.0
    estimated: bool = True

    def __post_init__(self) -> None:
        require_choice("form", self.form, _DEVIATIONS)
        require_at_least(0, first_layer_weight=self.first_layer_weight)

    def penalty(
        self, inputs: Tensor, model: nn.Module, params: Params, buffers: Params, sent: Params | None = None
    ) -> Tensor:
        """The penalty, a 0-d tensor. No argument is changed.

        buffers: with the running statistics. sent: those of the client's batch, by the same names, variances unbiased.
        The model runs in its present mode; in training mode under `torch.func` it must come from `batch_statistics`.
        """
        if not sent and not self.estimated:
            return inputs.new_zeros(())
        entered = layer_inputs(model, params, buffers, inputs, (_BatchNorm,))
        if not entered:
            raise ModelError(
                f"expected a model with batch norm, got {type(model).__name__} without; leave this penalty out"
            )
        deviation, share = _DEVIATIONS[self.form], 1.0 if self.form == "norms" else 1 / len(entered)
        parts = [share * deviation(values, *_known(values, name, buffers, sent or {})) for name, values in entered]
        return torch.stack([self.first_layer_weight * parts[0], *parts[1:]]).sum()


def _known(values: Tensor, name: str, buffers: Params, sent: Params) -> tuple[Tensor, Tensor]:
    """The known mean and biased variance of one layer's inputs (N, C, ...)."""
    names = statistics_of(name)
    mean, variance = (sent.get(each, buffers.get(each)) for each in names)
    if mean is None or variance is None:
        raise ModelError(f"expected running statistics of {name!r}, got none; leave the batch-norm penalty out")
    count = values.numel() // values.shape[1]
    return mean, variance * ((count - 1) / count) if names.variance in sent else variance


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel."""
    spread, centre = torch.var_mean(values, [dim for dim in range(values.ndim) if dim != 1], correction=0)
    return centre, spread


def _by_norms(values: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    centre, spread = _moments(values)
    return _norm(centre - mean) + _norm(spread - variance)


def _by_scale(values: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    centre, spread = _moments(values)
    scale = variance + _LEAST_VARIANCE
    return ((centre - mean).square() / scale + ((spread - variance) / (2 * scale)).square()).mean()


_DEVIATIONS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"norms": _by_norms, "relative": _by_scale}
_LEAST_VARIANCE = 1e-5  # that of batch norm itself


def _norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm of all elements; its derivative at zero is zero."""
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm
