"""Adam and RMSprop as pure functions of tensors, so that a step can be traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from leaktight.attacks.optimizers.first_order import FirstOrder, Variables

Slope: TypeAlias = Literal["plain", "sign", "soft_sign"]

_SLOPES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda gradient, left: gradient,
    "sign": lambda gradient, left: gradient.sign(),
    "soft_sign": lambda gradient, left: torch.tanh(gradient * left) / left,
}


@dataclass(frozen=True, kw_only=True)
class Adam(FirstOrder):
    """Adam, on the gradient or on its sign.

    slope: what takes the place of the gradient g: "plain", g itself; "sign" (Inverting Gradients); or "soft_sign",
    tanh(s g) / s with s falling from 1 to 0 (Fishing).
    """

    slope: Slope = "plain"
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def rates(self, iteration: int, iterations: int) -> tuple[float, ...]:
        """Learning rate, both bias corrections, fraction of the search that is left."""
        beta1, beta2 = self.betas
        corrections = 1 - beta1 ** (iteration + 1), 1 - beta2 ** (iteration + 1)
        return self.rate(iteration, iterations), *corrections, max(1 - iteration / iterations, 1e-3)

    def memory(self, variables: Variables) -> dict[str, Tensor]:
        return {
            f"{name}.{moment}": torch.zeros_like(v) for name, v in variables.items() for moment in ("first", "second")
        }

    def step(
        self, variables: Variables, gradient: Variables, memory: Variables, rates: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rate, correction1, correction2, left = rates.unbind()
        beta1, beta2 = self.betas
        following: dict[str, Tensor] = {}
        remembered: dict[str, Tensor] = {}
        for name, variable in variables.items():
            slope = _SLOPES[self.slope](gradient[name], left)
            first = beta1 * memory[f"{name}.first"] + (1 - beta1) * slope
            second = beta2 * memory[f"{name}.second"] + (1 - beta2) * slope * slope
            following[name] = variable - rate * (first / correction1) / ((second / correction2).sqrt() + self.epsilon)
            remembered |= {f"{name}.first": first, f"{name}.second": second}
        return following, remembered


@dataclass(frozen=True, kw_only=True)
class RmsProp(FirstOrder):
    """RMSprop with momentum: the gradient is divided by the root of its running mean square.

    momentum: in [0, 1). smoothing: the decay of the running mean square, in [0, 1).
    """

    learning_rate: float = 1e-4
    momentum: float = 0.99
    smoothing: float = 0.99
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("momentum", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 0 and < 1, got {getattr(self, name)}")

    def rates(self, iteration: int, iterations: int) -> tuple[float, ...]:
        return (self.rate(iteration, iterations),)

    def memory(self, variables: Variables) -> dict[str, Tensor]:
        return {
            f"{name}.{what}": torch.zeros_like(v) for name, v in variables.items() for what in ("square", "velocity")
        }

    def step(
        self, variables: Variables, gradient: Variables, memory: Variables, rates: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        following: dict[str, Tensor] = {}
        remembered: dict[str, Tensor] = {}
        for name, variable in variables.items():
            slope = gradient[name]
            square = self.smoothing * memory[f"{name}.square"] + (1 - self.smoothing) * slope * slope
            velocity = self.momentum * memory[f"{name}.velocity"] + slope / (square.sqrt() + self.epsilon)
            following[name] = variable - rates[0] * velocity
            remembered |= {f"{name}.square": square, f"{name}.velocity": velocity}
        return following, remembered
