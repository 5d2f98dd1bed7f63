"""Runs a traced graph as TorchScript, without Python between its operations.

The operations and their order are those of the graph and nothing is fused, so that the result is the same to the bit.
On small networks, whose operations are shorter than the way to them through Python, a call takes half the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from leaktight.core.faults import raise_fault


@dataclass(frozen=True)
class Script:
    """function: takes the inputs of the graph, then `constants`, the tensors that the graph holds."""

    graph: fx.GraphModule
    function: Callable[..., tuple[Tensor, ...]]
    constants: tuple[Tensor, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with _unchanged():
            return self.function(*tensors, *self.constants)


def scripted(graph: fx.GraphModule) -> Script | None:
    """The graph as TorchScript; None if something in it cannot be written that way, such as an operation of one's own.

    graph: of pure functions of tensors; its output is a tuple.
    """
    held = list(dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op == "get_attr"))
    try:
        unit = torch._C.CompilationUnit()
        unit.define(_source(graph.graph, held), _meaning)
        return Script(graph, unit.find_function("run"), tuple(getattr(graph, name) for name in held))
    except Exception as error:  # TorchScript refuses with any kind of error
        raise_fault(error)
        return None


def _meaning(name: str) -> Any:
    """What a name in the text stands for, beside its own variables."""
    return {"torch": torch}.get(name)


class _Unwritable(Exception):
    """Raised for what TorchScript has no words for."""


def _source(graph: fx.Graph, held: list[str]) -> str:
    """The text of a function `run`. held: the names of tensors that the graph holds, its last arguments."""
    constants = {name: f"constant_{place}" for place, name in enumerate(held)}
    names: dict[fx.Node, str] = {}
    inputs: list[str] = []
    lines: list[str] = []
    for place, node in enumerate(graph.nodes):
        names[node] = constants[str(node.target)] if node.op == "get_attr" else f"value_{place}"
        if node.op == "placeholder":
            inputs.append(names[node])
        elif node.op == "call_function":
            lines.append(f"{names[node]} = {_call(node, names)}")
        elif node.op == "output":
            lines.append(f"return ({''.join(f'{_word(each, names)}, ' for each in node.args[0])})")
        elif node.op != "get_attr":
            raise _Unwritable(node.op)
    arguments = ", ".join(f"{name}: Tensor" for name in (*inputs, *constants.values()))
    return "\n    ".join([f"def run({arguments}):", *lines]) + "\n"


def _call(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    if node.target is getitem:
        return f"{_word(node.args[0], names)}[{_word(node.args[1], names)}]"
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        raise _Unwritable(str(node.target))
    given = [_word(each, names) for each in node.args]
    given += [f"{key}={_word(each, names)}" for key, each in node.kwargs.items()]
    return f"torch.ops.aten.{node.target._opname}({', '.join(given)})"


def _word(value: object, names: Mapping[fx.Node, str]) -> str:
    """An argument of an operation in TorchScript's words."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_word(each, names) for each in value)}]" if value else "torch.jit.annotate(List[int], [])"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise _Unwritable(type(value).__name__)


@contextmanager
def _unchanged() -> Iterator[None]:
    """TorchScript runs functions as they are written: its optimisations could change the last bits."""
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)
