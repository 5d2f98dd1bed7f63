"""A network that a server sends has to be the one that was agreed on, down to hooks and attributes."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.types import Broadcast
from leaktight.guard.layout import architecture_change


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.register_buffer("fixed", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)
        self.plain = nn.Linear(3, 3, bias=False)
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        nn.init.ones_(self.frozen.weight)
        self.scale = 2.0
        self.steps = np.arange(3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * self.layers(inputs)  # type: ignore[no-any-return]


def sent(model: nn.Module) -> Broadcast:
    return Broadcast(parameters_of(model), buffers_of(model), 0, model)


def replaced_forward(model: Any) -> None:
    model.layers[0].forward = types.MethodType(lambda self, inputs: inputs[:, :8], model.layers[0])


def other_class(model: Any) -> None:
    class Linear(nn.Linear):
        pass

    Linear.__module__, Linear.__qualname__ = nn.Linear.__module__, nn.Linear.__qualname__
    model.layers[0].__class__ = Linear


class Yes(Tensor):
    """A tensor that says it equals every other."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func is torch.equal or super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def bias_where_none_was(model: Any) -> None:
    model.plain.bias = nn.Parameter(torch.full((3,), -3.0))


def tied(model: Any) -> None:
    model.layers[4].bias = model.layers[0].bias


CHANGES: dict[str, Callable[[Any], Any]] = {
    "forward": replaced_forward,
    "forward hook": lambda model: model.layers[0].register_forward_hook(lambda *args: None),
    "forward pre-hook": lambda model: model.layers[0].register_forward_pre_hook(lambda *args: None),
    "backward hook": lambda model: model.layers[0].register_full_backward_hook(lambda *args: None),
    "backward pre-hook": lambda model: model.layers[0].register_full_backward_pre_hook(lambda *args: None),
    "state-dict hook": lambda model: model.register_load_state_dict_post_hook(lambda *args: None),
    "attribute": lambda model: setattr(model, "kept", []),
    "changed attribute": lambda model: setattr(model, "scale", 3.0),
    "setting of a layer": lambda model: setattr(model.layers[3], "p", 0.9),
    "other class of the same name": other_class,
    "parametrization": lambda model: parametrizations.weight_norm(model.layers[0]),
    "module": lambda model: model.add_module("extra", nn.Identity()),
    "buffer": lambda model: model.register_buffer("extra", torch.ones(1), persistent=False),
    "value of a fixed buffer": lambda model: model.fixed.add_(1),
    "fixed buffer of another kind": lambda model: model._buffers.update(fixed=torch.zeros(2).as_subclass(Yes)),
    "buffer where none was": lambda model: setattr(model, "nothing", torch.ones(3)),
    "bias where none was": bias_where_none_was,
    "one tensor under two names": tied,
    "value of a frozen parameter": lambda model: model.frozen.weight.data.add_(1),
    "attribute of numbers": lambda model: setattr(model, "steps", np.arange(3) + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_not_agreed_on_is_named(change: str) -> None:
    agreed = Net()
    model = copy.deepcopy(agreed)
    assert architecture_change(sent(model), agreed) is None
    honest = sent(model)
    CHANGES[change](model)
    assert architecture_change(sent(model), agreed) is not None
    assert architecture_change(replace(honest, model=model), agreed) is not None, "whatever tensors are beside it"


def test_agreed_hooks_and_other_weights_pass() -> None:
    agreed = Net()

    def hook(*args: object) -> None:
        pass

    agreed.layers[0].register_forward_hook(hook)
    model = Net().eval()
    model.layers[0].register_forward_hook(hook)
    assert architecture_change(sent(model), agreed) is None


class Sly(Tensor):
    """A tensor with operations of its own."""


def test_tensors_of_other_kinds_are_refused() -> None:
    agreed = Net()
    honest = sent(agreed)
    for name, tensor in (
        ("layers.0.bias", torch.zeros(8).as_subclass(Sly)),
        ("layers.0.bias", torch.zeros(8).double()),
    ):
        changed = Broadcast({**honest.params, name: tensor}, honest.buffers, 0)
        assert "layers.0.bias" in str(architecture_change(changed, agreed))
