"""Traces iterations of attacks with PyTorch's fake tensors on a device that is no CPU; prints the devices of the graphs.

PyTorch without CUDA cannot differentiate fake tensors on "cuda", so a device of its own is registered.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from tests.contracts.test_attacks import smooth
from tests.seeds import replayed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from leaktight.attacks.optimizers import compile as compiling
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.core.devices import moved

THERE = torch.device("pretend", 0)
ATTACKS = {
    "first order": InvertingGradients(iterations=1, slopes="guessed"),
    "vmap": InvertingGradients(iterations=1, restarts=2, slopes="guessed"),
    "lbfgs": CsDlg(iterations=1),
}


class Traced(Exception):
    """The graph is there; fake tensors have no values to go on with."""


def placed(model: nn.Module) -> nn.Module:
    """The network on the device: `nn.Module.to` cannot swap fake parameters."""
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(each.detach().to(THERE)))
    return model


def devices_of(kind: str) -> list[str]:
    found: list[str] = []
    original = compiling._traced

    def traced(function: Any, inputs: Any) -> Any:
        graph = original(function, inputs)
        values = [node.meta.get("val") for node in graph.graph.nodes]
        found.extend({str(each.device) for each in values if isinstance(each, torch.Tensor) and each.ndim})
        raise Traced

    compiling._traced = traced
    ...
    return sorted(set(found))
