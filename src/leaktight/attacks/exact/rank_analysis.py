"""How much of a layer's input its gradient determines: the rank analysis of R-GAP, and a leakage bound per layer.

Given the gradient with respect to the outputs, the gradient of a layer's weights is linear in the layer's input; for a
convolution by the same matrix for every input channel. The rank of this matrix is the number of directions of the input
that the layer's own gradient determines. The rest may still follow from other layers or a prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from leaktight.attacks.exact.analytic import LAYERS
from leaktight.core.errors import ModelError
from leaktight.core.tasks import Classification, Task, example_losses
from leaktight.core.types import Batch, Mode, Params
from leaktight.models.surgery import batch_statistics, mode_of


@dataclass(frozen=True)
class LayerBound:
    """What one layer's gradient determines of its input for a batch.

    unknowns: numbers in the input. equations: entries of the weights' gradient. rank: how many are independent.
    outputs: numbers in the output; whoever knows them too has as many more equations.
    """

    layer: str
    kind: str
    unknowns: int
    equations: int
    rank: int
    outputs: int

    @property
    def share(self) -> float:
        """The fraction of the input's directions that the gradient determines."""
        return self.rank / self.unknowns

    @property
    def determines_input(self) -> bool:
        return self.rank == self.unknowns

    @property
    def with_outputs(self) -> bool:
        """Whether there are enough equations once the outputs are known, as in R-GAP; necessary, not sufficient."""
        return self.rank + self.outputs >= self.unknowns

    def describe(self) -> str:
        """
        >>> LayerBound("fc", "Linear", 10, 20, 10, 2).describe()
        'fc (Linear) determines its input: 10 of 10'
        """
        word = "determines its input" if self.determines_input else "hides part of its input"
        return f"{self.layer} ({self.kind}) {word}: {self.rank} of {self.unknowns}"


def leakage_bounds(
    model: nn.Module,
    params: Params,
    buffers: Params,
    batch: Batch,
    *,
    task: Task = Classification(),
    mode: Mode = "train",
) -> list[LayerBound]:
    """The bound of every convolution and linear layer, in the order in which they run, for the gradient of this batch.

    It is an upper bound of what the layer alone reveals, as the gradient with respect to its outputs is taken as known.
    ModelError if a layer runs twice.
    """
    entered: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    network = batch_statistics(model) if mode == "train" else model

    def keep(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if name in entered:
            raise ModelError(f"expected every layer to run once, got {name!r} twice; there is no bound for it")
        entered[name], left[name] = inputs[0].detach(), output

    handles = [
        module.register_forward_hook(partial(keep, name))
        for name, module in network.named_modules()
        if isinstance(module, LAYERS)
    ]
    try:
        with mode_of(network, mode), torch.enable_grad():
            leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in params.items()}
            fixed = {
                name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in buffers.items()
            }
            outputs = functional_call(network, ({**leaves}, fixed), (batch.inputs.double(),))
            loss = example_losses(task, outputs, batch.targets).mean()
            back = torch.autograd.grad(loss, list(left.values()), allow_unused=True, materialize_grads=True)
    finally:
        for handle in handles:
            handle.remove()
    return [
        _bound(name, network.get_submodule(name), entered[name], signal)
        for name, signal in zip(left, back, strict=True)
    ]


def _bound(name: str, layer: nn.Module, entered: Tensor, signal: Tensor) -> LayerBound:
    count, outputs, weights = entered.numel(), signal.numel(), layer.get_parameter("weight").numel()
    if isinstance(layer, nn.Linear):
        rank = layer.in_features * _rank(signal.reshape(-1, layer.out_features))
    elif isinstance(layer, nn.Conv2d) and layer.groups == 1:
        each = [gradient_matrix(layer, one, entered.shape[2:]) for one in signal]
        rank = layer.in_channels * _rank(torch.cat(each, 1))
    else:
        raise ModelError(f"expected plain 2-D convolutions and linear layers, got {name!r}; there is no bound for it")
    return LayerBound(name, type(layer).__name__, count, weights, rank, outputs)


def gradient_matrix(layer: nn.Conv2d, signal: Tensor, size: Sequence[int]) -> Tensor:
    """The matrix (outputs x kernel, H x W) from one input channel to its part of the weights' gradient.

    signal: the gradient with respect to the outputs of one example, (outputs, h, w). size: H and W of the input.
    """
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise ModelError("expected a convolution with zero padding given as numbers, got another; use a search")
    height, width = size
    cells = torch.eye(height * width, dtype=signal.dtype).reshape(-1, 1, height, width)
    where = F.unfold(cells, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # (HW, kernel, h x w)
    product = torch.einsum("ol,pkl->okp", signal.flatten(1), where)
    return product.reshape(-1, height * width)


def _rank(matrix: Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix)) if bool(matrix.any()) else 0
