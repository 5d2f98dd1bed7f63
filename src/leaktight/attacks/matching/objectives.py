"""Distances between the update of a guess and the observed one.

An objective has two functions. `prepare` runs once for each target and returns constants as nested tensors; `loss` is a
pure function of the guess and of these, in the precision of the guess, for use under `torch.func` and tracing. Names
that the target lacks (a defense withheld them) are not compared, so a guess may have more names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from leaktight.attacks.matching.layer_weights import WEIGHTINGS, Weighting, layer_weights
from leaktight.core.errors import UsageError
from leaktight.core.tensors import first_non_finite, squared_norm
from leaktight.core.text import as_written, sides
from leaktight.core.types import Params
from leaktight.models.source import require_choice

Prepared: TypeAlias = Mapping[str, Any]
"""Nested tensors by name: the target and what is derived from it."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A distance between updates.

    scale_free: whether a positive multiple of the guess has the same distance.
    """

    scale_free: ClassVar[bool] = False

    def prepare(self, target: Params, model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        """The constants of `loss`; they share no memory with the target.

        model, shape: the network and the shape of an image, for objectives that use the order of the layers.
        """
        _check_target(target, model)
        return self.constants({name: tensor.detach().clone() for name, tensor in target.items()}, model, shape)

    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        """The result of `prepare` for a target that it has checked and copied."""
        return {"target": target}

    @abstractmethod
    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        """The distance, a 0-d tensor."""


Reduction: TypeAlias = Literal["sum", "layer_mean", "element_mean"]

_REDUCTIONS: Mapping[str, Callable[[Mapping[str, Tensor]], float]] = {
    "sum": lambda target: 1.0,
    "layer_mean": lambda target: 1 / len(target),
    "element_mean": lambda target: 1 / sum(tensor.numel() for tensor in target.values()),
}


@dataclass(frozen=True, kw_only=True)
class _Elementwise(Objective):
    """A sum over all elements of a function of the difference.

    reduction: "sum"; "layer_mean", the sum over the number of tensors; "element_mean", over the number of elements.
    """

    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        require_choice("reduction", self.reduction, _REDUCTIONS)

    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        target = prepared["target"]
        parts = [self.cost(guess[name] - tensor).sum() for name, tensor in target.items()]
        return torch.stack(parts).sum() * _REDUCTIONS[self.reduction](target)

    @abstractmethod
    def cost(self, difference: Tensor) -> Tensor:
        """The cost of each element's difference."""


@dataclass(frozen=True, kw_only=True)
class SquaredError(_Elementwise):
    """The squared Euclidean distance: "sum" in DLG, iDLG and CPL, "layer_mean" in GGL.

    Reference: Zhu et al., Deep Leakage from Gradients, NeurIPS 2019.
    """

    def cost(self, difference: Tensor) -> Tensor:
        return difference.square()


@dataclass(frozen=True, kw_only=True)
class AbsoluteError(_Elementwise):
    """The sum of absolute differences, less affected by a few wrong entries than squares are."""

    def cost(self, difference: Tensor) -> Tensor:
        return difference.abs()


@dataclass(frozen=True, kw_only=True)
class Euclidean(Objective):
    """The Euclidean distance over all tensors: what GRNN's published code calls the Wasserstein distance."""

    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        return _root(torch.stack([(guess[name] - t).square().sum() for name, t in prepared["target"].items()]).sum())


@dataclass(frozen=True, kw_only=True)
class Cosine(Objective):
    """1 - cosine of the angle between the updates, each as one vector; it ignores their lengths.

    It is 1 if the guess or the target is zero.
    Reference: Geiping et al., Inverting Gradients, NeurIPS 2020.
    """

    scale_free: ClassVar[bool] = True

    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        return _directions(target, dict.fromkeys(target, 1.0))

    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        direction = prepared["direction"]
        along = torch.stack([(guess[name] * tensor).sum() for name, tensor in direction.items()]).sum()
        squares = torch.stack([guess[name].square().sum() for name in direction])
        return 1 - along / _root((prepared["weights"] * squares).sum())


@dataclass(frozen=True, kw_only=True)
class LayerCosine(Cosine):
    """AGIC's cosine with layer weights (Eq. 6 to 8).

    weighting: how the weight changes from the first convolution to the last: a function of Table I, or "equal".
    beta: the weight of the last convolution (1 / beta for the decreasing functions), >= 1; the first has weight 1. Use
        50 for untrained networks, 2 for trained ones.
    relu_modifier: divide a layer's weight by the fraction of its target gradient that is not exactly zero. Without ReLU
        there are hardly any zeros, and it does nothing.
    Differs from the paper, which leaves these open: a convolution's bias and the batch norm after it have its weight,
    projections are counted in the order in which they run, zeros are counted in the target, and in networks without
    convolutions the linear layers are counted.
    """

    weighting: Weighting = "increase_linear"
    beta: float = 50.0
    relu_modifier: bool = True

    def __post_init__(self) -> None:
        require_choice("weighting", self.weighting, WEIGHTINGS)
        if not (math.isfinite(self.beta) and self.beta >= 1):
            raise ValueError(f"expected beta >= 1, got {self.beta}; for decreasing weights set weighting")

    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        weights = layer_weights(
            model, shape, target, weighting=self.weighting, beta=self.beta, relu_modifier=self.relu_modifier
        )
        return _directions(target, weights)


@dataclass(frozen=True, kw_only=True)
class SortedWasserstein(Objective):
    """The 1-D Wasserstein-1 distance between the values of the updates: the mean difference of sorted values.

    It compares distributions and ignores positions, so it needs another term beside it.
    scope: "all", the values of all tensors together; "tensor", the sum over tensors.
    Reference: Ren, thesis, Eq. 3.4 (GRNN); its code computes the Euclidean norm instead.
    """

    scope: Literal["all", "tensor"] = "all"

    def __post_init__(self) -> None:
        require_choice("scope", self.scope, _SCOPES)

    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        vectors = _SCOPES[self.scope](target)
        # The target is kept for its names and their order.
        return {"target": target, "sorted": {name: vector.sort().values for name, vector in vectors.items()}}

    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        vectors = _SCOPES[self.scope]({name: guess[name] for name in prepared["target"]})
        parts = [(vectors[name].sort().values - want).abs().mean() for name, want in prepared["sorted"].items()]
        return torch.stack(parts).sum()


_SCOPES: Mapping[str, Callable[[Params], dict[str, Tensor]]] = {
    "all": lambda tensors: {"all": torch.cat([tensor.flatten() for tensor in tensors.values()])},
    "tensor": lambda tensors: {name: tensor.flatten() for name, tensor in tensors.items()},
}


@dataclass(frozen=True, kw_only=True)
class Sum(Objective):
    """A weighted sum of objectives. terms: pairs of a weight and an objective."""

    terms: tuple[tuple[float, Objective], ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("expected at least one term, got none; give pairs of a weight and an objective")
        if not all(math.isfinite(weight) for weight, _ in self.terms):
            raise ValueError(f"expected finite weights, got {as_written([weight for weight, _ in self.terms])}")

    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        # Each term has its own copies: tracing would merge a tensor that is given twice into one input.
        return {str(place): term.prepare(target, model, shape) for place, (_, term) in enumerate(self.terms)}

    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        parts = [weight * term.loss(guess, prepared[str(place)]) for place, (weight, term) in enumerate(self.terms)]
        return torch.stack(parts).sum()


def _directions(target: Params, weights: Mapping[str, float]) -> dict[str, Any]:
    """The constants of the weighted cosine: alpha_i t_i / |t|_alpha by name, and alpha as a vector in that order."""
    length = math.sqrt(sum(weights[name] * float(squared_norm([tensor])) for name, tensor in target.items()))
    scale = 1 / length if length else 0.0
    example = next(iter(target.values()))
    return {
        "direction": {name: tensor * (weights[name] * scale) for name, tensor in target.items()},
        "weights": torch.tensor([weights[name] for name in target], dtype=example.dtype, device=example.device),
    }


def _root(squares: Tensor) -> Tensor:
    """A square root with a finite derivative at zero."""
    return (squares + torch.finfo(squares.dtype).tiny).sqrt()


def _check_target(target: Params, model: nn.Module) -> None:
    """Raise UsageError unless the target is finite and its names and shapes are the model's."""
    if not target:
        raise UsageError("expected an update with at least one tensor to match, got none; the defense withheld all")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, tensor in target.items():
        if name not in shapes:
            raise UsageError(
                f"expected tensors of the model's parameters, got {name!r}; the update is of another model"
            )
        if tuple(tensor.shape) != shapes[name]:
            raise UsageError(
                f"expected {name!r} of shape {sides(shapes[name])}, got {sides(tensor.shape)}; "
                "the update is of another model"
            )
    if (bad := first_non_finite(target)) is not None:
        raise UsageError(f"expected finite numbers in the update, got NaN or infinity in {bad!r}; nothing can match it")
