"""How far a guessed update is from the observed one.

An objective is two functions. `prepare` runs once per target and gives the constants as a nested mapping of tensors;
`loss` is a pure function of the guess and of these, in the precision of the guess, and works under `torch.func` and
tracing. A name that the target lacks (a defense withheld it) is not matched, so a guess may hold more names.
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
from leaktight.core.types import Params
from leaktight.models.source import require_choice

Prepared: TypeAlias = Mapping[str, Any]
"""Tensors by name, nested: the target and what was derived from it."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A distance between updates.

    scale_free: whether a positive multiple of the guess is as good as the guess.
    """

    scale_free: ClassVar[bool] = False

    def prepare(self, target: Params, model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        """The constants of `loss`: copies, which share no memory with the target.

        model, shape: the network and the size of its images; some objectives look at the order of the layers.
        """
        _check_target(target, model)
        return self.constants({name: tensor.detach().clone() for name, tensor in target.items()}, model, shape)

    @abstractmethod
    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        """What `prepare` gives for a target that it has checked and copied."""

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

    reduction: "sum" over all elements; "layer_mean", that divided by the number of tensors; "element_mean", that
    divided by the number of elements.
    """

    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        require_choice("reduction", self.reduction, _REDUCTIONS)

    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        return {"target": target}

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
    """The sum of absolute differences, less moved by a few wrong entries than squares are."""

    def cost(self, difference: Tensor) -> Tensor:
        return difference.abs()


@dataclass(frozen=True, kw_only=True)
class Euclidean(Objective):
    """The Euclidean distance over all tensors: what GRNN's published code calls the Wasserstein distance."""

    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        return {"target": target}

    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        return _root(torch.stack([(guess[name] - t).square().sum() for name, t in prepared["target"].items()]).sum())


@dataclass(frozen=True, kw_only=True)
class Cosine(Objective):
    """1 - cosine of the angle between the updates, each taken as one vector; blind to their lengths.

    It is 1 where the guess or the target is zero.
    Reference: Geiping et al., Inverting Gradients, NeurIPS 2020.
    """

    scale_free: ClassVar[bool] = True

    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        return _directions(target, dict.fromkeys(target, 1.0))

    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        return _weighted_cosine(guess, prepared)


@dataclass(frozen=True, kw_only=True)
class LayerCosine(Objective):
    """AGIC's cosine with layer weights (Eq. 6 to 8).

    weighting: how the weight moves from the first convolution to the last; the functions of Table I, or "equal".
    beta: the weight of the last convolution (1 / beta for the decreasing functions), where the first has 1; 50 for
        untrained networks, 2 for trained ones.
    relu_modifier: divide by the share of a layer's target gradient that is not exactly zero. Networks without ReLU
        have hardly any such zeros, so it does nothing there.
    Differs from the paper: it leaves open, and this decides, that a convolution's bias and the batch norm after it
    take its weight, that projections are counted as they run, and that zeros are counted in the target. Networks
    without convolutions, which it does not treat, have their linear layers counted.
    """

    scale_free: ClassVar[bool] = True

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

    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        return _weighted_cosine(guess, prepared)


@dataclass(frozen=True, kw_only=True)
class SortedWasserstein(Objective):
    """The 1-D Wasserstein-1 distance between the values of the updates: the mean difference of sorted values.

    It compares distributions and does not see where a value stands, so it needs another term beside it.
    scope: "all", the values of all tensors together; "tensor", each tensor by itself, added up.
    Reference: Ren, thesis, Eq. 3.4 (GRNN); its code computes the Euclidean norm instead.
    """

    scope: Literal["all", "tensor"] = "all"

    def __post_init__(self) -> None:
        require_choice("scope", self.scope, _SCOPES)

    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        vectors = _SCOPES[self.scope](target)
        # The target itself is kept for its names and order alone.
        return {"target": target, "sorted": {name: vector.sort().values for name, vector in vectors.items()}}

    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        vectors = _SCOPES[self.scope]({name: guess[name] for name in prepared["target"]})
        parts = [(vectors[name].sort().values - want).abs().mean() for name, want in prepared["sorted"].items()]
        return torch.stack(parts).sum()


def _together(tensors: Params) -> dict[str, Tensor]:
    return {"all": torch.cat([tensor.flatten() for tensor in tensors.values()])}


def _apart(tensors: Params) -> dict[str, Tensor]:
    return {name: tensor.flatten() for name, tensor in tensors.items()}


_SCOPES: Mapping[str, Callable[[Params], dict[str, Tensor]]] = {"all": _together, "tensor": _apart}


@dataclass(frozen=True, kw_only=True)
class Sum(Objective):
    """A weighted sum of objectives: pairs of a weight and an objective."""

    terms: tuple[tuple[float, Objective], ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("expected at least one term, got none; give pairs of a weight and an objective")
        if not all(math.isfinite(weight) for weight, _ in self.terms):
            raise ValueError(f"expected finite weights, got {[weight for weight, _ in self.terms]}")

    def constants(self, target: dict[str, Tensor], model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
        # Each term has copies of its own: a tracer takes one tensor in two places for one input.
        return {str(place): term.prepare(target, model, shape) for place, (_, term) in enumerate(self.terms)}

    def loss(self, guess: Params, prepared: Prepared) -> Tensor:
        parts = [weight * term.loss(guess, prepared[str(place)]) for place, (weight, term) in enumerate(self.terms)]
        return torch.stack(parts).sum()


def _directions(target: Params, weights: Mapping[str, float]) -> dict[str, Any]:
    """The constants of the weighted cosine: alpha_i t_i / |t|_alpha by name, and alpha as one vector in that order."""
    length = math.sqrt(sum(weights[name] * float(squared_norm([tensor])) for name, tensor in target.items()))
    scale = 1 / length if length else 0.0
    example = next(iter(target.values()))
    return {
        "direction": {name: tensor * (weights[name] * scale) for name, tensor in target.items()},
        "weights": torch.tensor([weights[name] for name in target], dtype=example.dtype, device=example.device),
    }


def _weighted_cosine(guess: Params, prepared: Prepared) -> Tensor:
    direction = prepared["direction"]
    along = torch.stack([(guess[name] * tensor).sum() for name, tensor in direction.items()]).sum()
    squares = torch.stack([guess[name].square().sum() for name in direction])
    return 1 - along / _root((prepared["weights"] * squares).sum())


def _root(squares: Tensor) -> Tensor:
    """A square root whose derivative is finite at zero."""
    return (squares + torch.finfo(squares.dtype).tiny).sqrt()


def _check_target(target: Params, model: nn.Module) -> None:
    """Raise UsageError unless the target is finite and its tensors are some of the model's, in shape."""
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
                f"expected {name!r} of shape {shapes[name]}, got {tuple(tensor.shape)}; the update is of another model"
            )
    if (bad := first_non_finite(target)) is not None:
        raise UsageError(f"expected finite numbers in the update, got NaN or infinity in {bad!r}; nothing can match it")
