"""What flows back to every unit of a network from every example, and examples made up for when none may be used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from leaktight.core.inputs import Inputs
from leaktight.core.tasks import Task, example_losses
from leaktight.core.types import Batch, Mode, Params
from leaktight.models.surgery import CONVOLUTIONS, batch_statistics, mode_of

_LAYERS = (nn.Linear, *CONVOLUTIONS)


@dataclass(frozen=True)
class Signal:
    """The gradient of the examples' losses by the outputs of a layer, (N, units, places).

    rows: the weights of each unit, (units, inputs); of a batch norm, those of the layer before it.
    """

    name: str
    back: Tensor
    rows: Tensor

    @property
    def strength(self) -> Tensor:
        """The size of what each unit gets from each example, (N, units)."""
        return self.back.abs().sum(2)


def signals(model: nn.Module, params: Params, buffers: Params, batch: Batch, *, task: Task, mode: Mode) -> list[Signal]:
    """The signals of all linear layers, convolutions and batch norms, in the order in which they run.

    Layers whose outputs are not one value or one map of values for each example are left out.
    """
    network = batch_statistics(model)
    kept: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept.pop(name, None)
        kept[name] = output

    handles = [
        module.register_forward_hook(partial(keep, name))
        for name, module in network.named_modules()
        if isinstance(module, (*_LAYERS, _BatchNorm))
    ]
    try:
        with mode_of(network, mode), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
            outputs = functional_call(network, ({**leaves}, {**buffers}), (batch.inputs,))
            loss = example_losses(task, outputs, batch.targets).sum()
            backs = torch.autograd.grad(loss, list(kept.values()), allow_unused=True, materialize_grads=True)
    finally:
        for handle in handles:
            handle.remove()
    return list(_signals(network, dict(zip(kept, backs, strict=True)), params, len(batch)))


def _signals(network: nn.Module, backs: Params, params: Params, count: int) -> list[Signal]:
    found: list[Signal] = []
    rows: Tensor | None = None
    for name, back in backs.items():
        module = network.get_submodule(name)
        if isinstance(module, _LAYERS):
            rows = params[f"{name}.weight" if name else "weight"].detach().flatten(1)
            if isinstance(module, nn.Linear) and back.ndim > 2:
                back = back.movedim(-1, 1)
        if rows is None or len(back) != count or back.shape[1] != len(rows):
            continue
        found.append(Signal(name, back.flatten(2) if back.ndim > 2 else back[:, :, None], rows))
    return found


def made_up(inputs: Inputs, count: int, generator: torch.Generator) -> Tensor:
    """Images (count, C, H, W) that nobody owns: smooth random fields of random brightness and contrast, in [0, 1]."""
    channels, height, width = inputs.shape
    noise = torch.randn(count, channels, height, width, generator=generator)
    noise = noise + torch.randn(count, 1, height, width, generator=generator)
    rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    decay = 1 / (rows.square() + columns.square()).sqrt().clamp_min(1 / max(height, width))
    field = torch.fft.irfft2(torch.fft.rfft2(noise) * decay, s=(height, width))
    field = field / field.std(dim=(1, 2, 3), keepdim=True).clamp_min(1e-6)
    contrast, level = torch.rand(2, count, 1, 1, 1, generator=generator)
    images: Tensor = (level + 0.4 * contrast * field).clamp(0, 1)
    return images
