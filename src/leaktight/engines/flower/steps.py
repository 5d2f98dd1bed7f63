"""A defense on every step of PyTorch's optimisers, inside a training loop that it does not control."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from leaktight.core.errors import UsageError
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, HiddenBatch, Params, State

_ADVICE = "put leaktight.defenses.wrap into the training loop, or run `leaktight train --engine flower`"


def _hidden(what: str) -> UsageError:
    return UsageError(f"this defense needs {what}, which a mod cannot see; {_ADVICE}")


class HiddenModel(nn.Module):
    """Replaces the network, which a mod cannot see: every use is an error."""

    def __init__(self) -> None:
        """Sets no attributes, so that each of them is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _hidden("the network")


def _hidden_per_example() -> NoReturn:
    raise _hidden("the gradient of each example")


def _hidden_loss(params: Params, batch: Batch) -> NoReturn:
    raise _hidden("the loss of a batch")


@dataclass
class DefendedSteps:
    """Applies a defense to the optimiser steps of one thread.

    count: the steps so far. error: the exception after which the update must not be sent, or None.
    """

    defense: Defense
    state: State
    round: int
    model: nn.Module
    rng: Rng
    report: Report
    count: int = 0
    error: Exception | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Defend every step that this thread's optimisers take inside the block."""
        thread = threading.get_ident()

        def hook(optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if threading.get_ident() != thread:
                return
            try:
                self._defend(optimizer, args, kwargs)
            except Exception as error:
                self.error = error  # the training loop may catch it; the mod must still send nothing
                raise

        handle = register_optimizer_step_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def _defend(self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if kwargs.get("closure") is not None or any(callable(each) for each in args):
            raise UsageError("a step with a closure computes its own gradients, which a mod cannot defend")
        found = _by_index(optimizer)
        gradients = {index: _gradient(parameter) for index, parameter in found.items()}
        defended, self.state = self.defense.on_gradient(
            self._step(found, gradients, optimizer.param_groups[0]["lr"]),
            self.state,
            rng=self.rng.child("step", self.count, "gradient"),
            report=self.report,
        )
        for index, parameter in found.items():
            parameter.grad = defended[index].detach().clone()
        self.count += 1

    def _step(self, found: Params, gradients: Params, learning_rate: float) -> Step:
        return Step(
            index=self.count,
            round=self.round,
            model=self.model,
            params={index: parameter.detach().clone() for index, parameter in found.items()},
            buffers={},
            batch=HiddenBatch(_hidden("the batch of each step")),
            gradient=gradients,
            learning_rate=learning_rate,
            per_example=_hidden_per_example,
            loss=_hidden_loss,
        )


def _by_index(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The parameters with a gradient, named "group.index": a mod does not know their names."""
    return {
        f"{group}.{index}": parameter
        for group, settings in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(settings["params"])
        if parameter.grad is not None
    }


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach().clone()
