"""Fake tensors on a device that is no CPU: iterations of attacks and every network; prints the devices of the results.

PyTorch without CUDA cannot differentiate fake tensors on "cuda", so a device of its own is registered. Run as a script.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import NoReturn
from unittest.mock import patch

import torch
from tests.contracts.test_attacks import smooth
from tests.models.test_catalogue import NATURAL, on_meta
from tests.seeds import replayed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from leaktight.attacks.optimizers import compile as compiling
from leaktight.attacks.optimizers import first_order, lbfgs
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.config.catalogue import MODELS
from leaktight.core.protocols import Attack
from leaktight.models.surgery import batch_statistics

THERE = "pretend:0"
WORDS = "crnn"
"""Its derivative creates tensors in C++, which a device of Python's cannot; `test_devices.py` pretends for it."""


ATTACKS = {
    "first order": InvertingGradients(iterations=1, parallel="none"),
    "vmap": InvertingGradients(iterations=1, restarts=2, parallel="vmap"),
    "lbfgs": CsDlg(iterations=1),
}


class Traced(Exception):
    """The graph is there; fake tensors have no values to go on with."""


def _number(value: Tensor) -> bool:
    """A single number on the CPU, which may meet tensors of every device."""
    return value.ndim == 0 and value.device.type == "cpu"


def devices_of(attack: Attack) -> list[str]:
    """The devices of all values in the graph of one iteration, whose inputs are on the registered device."""
    found: set[str] = set()

    def traced(function: Callable[..., tuple[Tensor, ...]], example: Sequence[Tensor], *settings: object) -> NoReturn:
        with FakeTensorMode():
            inputs = [torch.empty(each.shape, dtype=each.dtype, device=THERE) for each in example]
            graph = compiling._traced(function, inputs)
        values = [node.meta.get("val") for node in graph.graph.nodes]
        found.update(str(each.device) for each in values if isinstance(each, Tensor) and not _number(each))
        raise Traced

    with patch.object(first_order, "make_runnable", traced), patch.object(lbfgs, "make_runnable", traced):
        try:
            attack.reconstruct(smooth(), rng=replayed(1))
        except Traced:
            return sorted(found)
    raise AssertionError("expected an attack that traces its iteration")


def devices_of_gradient(kind: str) -> list[str]:
    """The devices of a network's outputs and gradient. Nothing is computed, so that the size does not matter."""
    inputs, num_classes = NATURAL[kind]
    model = batch_statistics(on_meta(MODELS[kind](), inputs, num_classes))
    with FakeTensorMode():
        params, buffers = (
            {name: torch.empty(each.shape, dtype=each.dtype, device=THERE) for name, each in named}
            for named in (model.named_parameters(), model.named_buffers())
        )
        images = torch.empty(2, *inputs.shape, device=THERE)

        def loss(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            outputs: Tensor = functional_call(model, (leaves, buffers), (images,))
            return outputs.square().mean(), outputs

        gradient, outputs = grad(loss, has_aux=True)(params)
    return sorted({str(each.device) for each in (outputs, *gradient.values())})


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend("pretend")
    found = {name: devices_of(attack) for name, attack in ATTACKS.items()}
    found |= {kind: devices_of_gradient(kind) for kind in MODELS if kind != WORDS}
    print(json.dumps(found), flush=True)  # noqa: T201
    os._exit(
        0
    )  # the usual exit sometimes aborts, as PyTorch has a thread for the registered device and does not join it
