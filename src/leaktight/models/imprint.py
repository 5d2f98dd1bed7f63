"""The imprint module of Robbing the Fed, which a malicious server inserts before the first layer."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import Tensor, nn

from leaktight.core.errors import ModelError
from leaktight.core.inputs import Inputs

NAME = "imprint"


class Imprint(nn.Module):
    """A linear layer to as many units as there are bins, an activation, and a linear layer back to an image.

    top: the largest output of a unit (Hardtanh from 0); None: no limit (ReLU).
    """

    def __init__(self, inputs: Inputs, num_bins: int, top: float | None = None) -> None:
        super().__init__()
        size = inputs.size
        self.into = nn.Linear(size, num_bins)
        self.activation = nn.ReLU() if top is None else nn.Hardtanh(0.0, top)
        self.back = nn.Linear(num_bins, size)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.back(self.activation(self.into(inputs.flatten(1))))
        return outputs.reshape(inputs.shape)


@dataclass(frozen=True)
class _First:
    """A forward pre-hook of the model; it finds the module by name, so that it works in copies."""

    def __call__(self, model: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
        return (model.get_submodule(NAME)(inputs[0]), *inputs[1:])


def with_imprint(model: nn.Module, inputs: Inputs, num_bins: int, top: float | None = None) -> nn.Module:
    """A copy that sees its images through an imprint module. All other names stay as they are.

    num_bins, top: of the `Imprint`.
    """
    if any(name == NAME for name, _ in model.named_children()):
        raise ModelError(f"expected a model without a part named {NAME!r}, got one that has it")
    changed = copy.deepcopy(model)
    parts = dict(changed.named_children())
    for name in parts:
        delattr(changed, name)
    for name, part in {NAME: Imprint(inputs, num_bins, top), **parts}.items():
        changed.add_module(name, part)
    changed.register_forward_pre_hook(_First())
    return changed
