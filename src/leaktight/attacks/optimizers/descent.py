"""First-order optimisers as pure steps: tensors in, tensors out, nothing of Python's in between."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Variables: TypeAlias = Mapping[str, Tensor]
"""What is searched for, by name."""

Decay: TypeAlias = Literal["constant", "steps", "cosine"]

_DECAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "steps": lambda share: 0.1 ** sum(share >= milestone for milestone in (3 / 8, 5 / 8, 7 / 8)),
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
}

Slope: TypeAlias = Literal["plain", "sign", "soft_sign"]

_SLOPES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda gradient, left: gradient,
    "sign": lambda gradient, left: gradient.sign(),
    "soft_sign": lambda gradient, left: torch.tanh(gradient * left) / left,
}


@dataclass(frozen=True, kw_only=True)
class FirstOrder(ABC):
    """An optimiser of first order: how fast it goes in each iteration, and what a step is.

    decay: the learning rate is "constant", falls by "steps" of 0.1 at 3/8, 5/8 and 7/8 of the iterations, or as a
    "cosine".
    warm_up: iterations in which it rises to its value. langevin: noise of langevin x learning rate in every step.
    """

    learning_rate: float = 0.1
    decay: Decay = "constant"
    warm_up: int = 0
    langevin: float = 0.0

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"expected learning_rate > 0, got {self.learning_rate}")
        if self.warm_up < 0 or self.langevin < 0:
            raise ValueError(f"expected warm_up >= 0 and langevin >= 0, got {self.warm_up} and {self.langevin}")

    def rate(self, iteration: int, iterations: int) -> float:
        """The learning rate of one iteration."""
        rate = self.learning_rate * _DECAYS[self.decay](iteration / iterations)
        return rate * (iteration + 1) / self.warm_up if iteration < self.warm_up else rate

    @abstractmethod
    def rates(self, iteration: int, iterations: int) -> tuple[float, ...]:
        """The numbers that change from step to step; the learning rate is the first."""

    @abstractmethod
    def memory(self, variables: Variables) -> dict[str, Tensor]:
        """What is remembered before the first step."""

    @abstractmethod
    def step(
        self, variables: Variables, gradient: Variables, memory: Variables, rates: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The next variables and memory. rates: those of this step, from `rates`."""


@dataclass(frozen=True, kw_only=True)
class Adam(FirstOrder):
    """Adam, on the gradient or on its sign.

    slope: "plain", "sign" (Inverting Gradients), or "soft_sign", tanh(s g) / s with s falling from 1 to 0 (Fishing).
    """

    slope: Slope = "plain"
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def rates(self, iteration: int, iterations: int) -> tuple[float, ...]:
        """Learning rate, both bias corrections, share of the way left."""
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
    """RMSprop: the gradient over the root of its mean square, gathered with momentum.

    momentum: the share of the last step that is taken again. smoothing: the share of the mean square that stays.
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
