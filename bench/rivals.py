"""What the matching loop is compared with: the same attack in plain PyTorch, and that of the package breaching."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leaktight.core.rng import Rng
from leaktight.core.types import Observation

Loop = Callable[[], None]
"""Some iterations of Inverting Gradients."""


def eager_loop(seen: Observation, iterations: int) -> Loop:
    """Inverting Gradients in plain PyTorch: no tracing, but nothing wasteful either."""
    model: nn.Module = seen.model
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    target = [seen.update.tensors[name] for name, _ in model.named_parameters()]
    norm = torch.stack([tensor.square().sum() for tensor in target]).sum().sqrt()
    assert seen.labels is not None
    labels = seen.labels

    def run() -> None:
        guess = torch.rand((len(labels), *seen.inputs.shape), generator=Rng(1).public()).requires_grad_()
        optimizer = torch.optim.Adam([guess], lr=0.025)
        best, best_loss = guess.detach().clone(), torch.tensor(torch.inf)
        model.train()
        for _ in range(iterations):
            gradient = torch.autograd.grad(F.cross_entropy(model(guess), labels), params, create_graph=True)
            dot = torch.stack([(a * b).sum() for a, b in zip(gradient, target, strict=True)]).sum()
            size = torch.stack([a.square().sum() for a in gradient]).sum().sqrt()
            rows = (guess[:, :, 1:] - guess[:, :, :-1]).abs().mean()
            columns = (guess[:, :, :, 1:] - guess[:, :, :, :-1]).abs().mean()
            loss = 1 - dot / (size * norm) + 4e-4 * (rows + columns)
            (slope,) = torch.autograd.grad(loss, guess)
            with torch.no_grad():
                better = loss < best_loss
                best, best_loss = torch.where(better, guess, best), torch.where(better, loss, best_loss)
            guess.grad = slope.sign()
            optimizer.step()
            with torch.no_grad():
                guess.clamp_(0, 1)

    return run


def breaching_loop(seen: Observation, iterations: int) -> Loop:
    """The same by the package breaching (`has_breaching`), through its own interface."""
    channels = seen.inputs.shape[0]
    return breaching_attack(seen.model, seen, [0.0] * channels, [1.0] * channels, iterations=iterations)


def breaching_attack(
    model: nn.Module,
    seen: Observation,
    mean: Sequence[float],
    std: Sequence[float],
    look: Callable[[Tensor], None] | None = None,
    iterations: int | None = None,
) -> Loop:
    """Inverting Gradients of breaching, with its own settings.

    model: the network for inputs that are already normalised. look: called with the images of every iteration.
    breaching runs a network in evaluation mode if it is given its buffers, and otherwise in training mode.
    """
    breaching: Any = importlib.import_module("breaching")
    changes = [] if iterations is None else [f"optim.max_iterations={iterations}"]
    with contextlib.redirect_stdout(io.StringIO()):
        settings = breaching.get_attack_config("invertinggradients", overrides=changes)
    attacker = breaching.attacks.prepare_attack(model, nn.CrossEntropyLoss(), settings)
    if look is not None:
        scale, shift = (torch.tensor(each)[:, None, None] for each in (std, mean))
        attacker.objective.register_forward_pre_hook(lambda module, given: look(given[2] * scale + shift))
    about = SimpleNamespace(shape=seen.inputs.shape, mean=list(mean), std=list(std), modality="vision")
    buffers = list(model.buffers()) if seen.mode == "eval" else None
    sent = [{"parameters": list(seen.broadcast.params.values()), "buffers": buffers, "metadata": about}]
    facts = {"num_data_points": seen.batch_size, "labels": seen.labels, "local_hyperparams": None}
    shared = [{"gradients": list(seen.update.tensors.values()), "buffers": None, "metadata": facts}]
    return lambda: attacker.reconstruct(sent, shared, {})


def has_breaching() -> bool:
    return importlib.util.find_spec("breaching") is not None
