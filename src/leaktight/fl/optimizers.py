"""Optimisers of local training: the steps of `torch.optim` without in-place changes, so that they are differentiable.

An optimiser is used for one round of one client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from leaktight.core.training import LocalTraining
from leaktight.core.types import Params


class LocalOptimizer(Protocol):
    """Computes the next parameters from parameters and gradient; keeps its state between calls."""

    def __call__(self, params: Params, gradient: Params, learning_rate: float | Tensor) -> dict[str, Tensor]: ...


class Sgd:
    """`torch.optim.SGD`: momentum, Nesterov, weight decay."""

    def __init__(self, local: LocalTraining) -> None:
        self.local = local
        self.velocity: dict[str, Tensor] = {}

    def __call__(self, params: Params, gradient: Params, learning_rate: float | Tensor) -> dict[str, Tensor]:
        steps = {name: self._direction(name, tensor, gradient[name]) for name, tensor in params.items()}
        if isinstance(learning_rate, Tensor):
            return {name: tensor - learning_rate * steps[name] for name, tensor in params.items()}
        return {name: tensor.sub(steps[name], alpha=learning_rate) for name, tensor in params.items()}

    def _direction(self, name: str, param: Tensor, gradient: Tensor) -> Tensor:
        local = self.local
        if local.weight_decay:
            gradient = gradient + local.weight_decay * param
        if not local.momentum:
            return gradient
        before = self.velocity.get(name)
        velocity = gradient if before is None else local.momentum * before + gradient
        self.velocity[name] = velocity
        return gradient + local.momentum * velocity if local.nesterov else velocity


class Adam:
    """`torch.optim.Adam` with coupled weight decay."""

    def __init__(self, local: LocalTraining) -> None:
        self.local = local
        self.time = 0
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def __call__(self, params: Params, gradient: Params, learning_rate: float | Tensor) -> dict[str, Tensor]:
        self.time += 1
        beta1, beta2 = self.local.betas
        correction1, correction2 = 1 - beta1**self.time, 1 - beta2**self.time
        result = {}
        for name, param in params.items():
            slope = gradient[name] + self.local.weight_decay * param if self.local.weight_decay else gradient[name]
            self.first[name] = beta1 * self.first.get(name, torch.zeros_like(param)) + (1 - beta1) * slope
            self.second[name] = beta2 * self.second.get(name, torch.zeros_like(param)) + (1 - beta2) * slope * slope
            denominator = (self.second[name] / correction2).sqrt() + self.local.epsilon
            result[name] = param - learning_rate * (self.first[name] / correction1) / denominator
        return result


_OPTIMIZERS: Mapping[str, Callable[[LocalTraining], LocalOptimizer]] = {"sgd": Sgd, "adam": Adam}


def make_optimizer(local: LocalTraining) -> LocalOptimizer:
    """A new optimiser with these settings."""
    return _OPTIMIZERS[local.optimizer](local)
