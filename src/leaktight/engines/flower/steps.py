"""A defense inside a training loop that somebody else wrote: it sees every step of PyTorch's optimisers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from leaktight.core.errors import UsageError
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.types import Params, State

_ADVICE = "put leaktight.defenses.wrap into the training loop, or run `leaktight train --engine flower`"


class Hidden:
    """Stands where a step has something that cannot be seen from outside of the loop. Whoever looks is told so."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise UsageError(f"this defense needs {self._what}, which a mod cannot see; {_ADVICE}")

    def __call__(self, *_: Any) -> Any:
        raise UsageError(f"this defense needs {self._what}, which a mod cannot see; {_ADVICE}")


@dataclass
class Watch:
    """The defense's hook on every step that one thread makes. error: why the update must not be sent."""

    defense: Defense
    state: State
    round: int
    model: nn.Module
    rng: Rng
    report: Report
    steps: int = 0
    error: Exception | None = None

    def on_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._on_step(optimizer, args, kwargs)
        except Exception as error:
            self.error = error  # should the loop swallow what is raised here, the mod still sends nothing
            raise

    def _on_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure") is not None or any(callable(each) for each in args):
            raise UsageError("a step with a closure computes gradients of its own, which no mod can defend")
        found = _by_place(optimizer)
        gradients = {place: _gradient(parameter) for place, parameter in found.items()}
        defended, self.state = self.defense.on_gradient(
            self._step(found, gradients, optimizer.param_groups[0]["lr"]),
            self.state,
            rng=self.rng.child("step", self.steps, "gradient"),
            report=self.report,
        )
        for place, parameter in found.items():
            parameter.grad = defended[place].detach().clone()
        self.steps += 1

    def _step(self, found: Params, gradients: Params, learning_rate: float) -> Step:
        hidden: Callable[[str], Any] = Hidden
        return Step(
            index=self.steps,
            round=self.round,
            model=self.model,
            params={place: parameter.detach().clone() for place, parameter in found.items()},
            buffers={},
            batch=hidden("the batch of each step"),
            gradient=gradients,
            learning_rate=learning_rate,
            per_example=hidden("the gradient of each example"),
            loss=hidden("the loss of a batch"),
        )


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Show the watch every optimiser step that this thread makes in the block, before it is made."""
    thread = threading.get_ident()

    def hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            watch.on_step(optimizer, args, kwargs)

    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _by_place(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The parameters with a gradient; a mod does not know their names, so they go by their places."""
    return {
        f"{group}.{place}": parameter
        for group, settings in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(settings["params"])
        if parameter.grad is not None
    }


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach().clone()
