"""How a pure function of tensors is run: as it is, as a traced graph, or compiled.

The double backward of a convolution computes weight gradients that nobody uses. A traced graph lets dead code be
dropped, which plain execution cannot do. All backends give the same step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, fx
from torch.func import functionalize

Backend: TypeAlias = Literal["eager", "fx", "inductor"]
Function: TypeAlias = Callable[..., tuple[Tensor, ...]]

_PASS_THROUGH = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
_TRIALS = 3
_CLEARLY = 1.2


@dataclass(frozen=True)
class Runnable:
    """A function ready to be called again and again with tensors of the same shapes.

    onednn: whether the convolutions of oneDNN are used; the flag is the same at compile and at run time.
    """

    function: Function
    backend: Backend
    onednn: bool

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), _onednn(self.onednn):
            return self.function(*tensors)


def make_runnable(
    function: Function, example: Sequence[Tensor], backend: Backend, onednn: bool | None = None
) -> Runnable:
    """Prepare `function` for tensors like those of `example`, which stays untouched.

    What cannot be traced runs eagerly, with a warning that says why. Small convolutions are often faster without
    oneDNN: a few timed calls decide, unless `onednn` does. The two differ in the last bits of their results.
    """
    inputs = [tensor.detach().clone() for tensor in example]  # tracing tells inputs apart by identity
    if backend == "eager":
        return _choose(function, inputs, backend, onednn)
    try:
        graph = _traced(function, inputs)
    except Exception as error:  # tracing fails in as many ways as there are networks
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"this network cannot be traced and runs eagerly ({reason})", stacklevel=2)
        return _choose(function, inputs, "eager", onednn)
    chosen = _choose(graph, inputs, "fx", onednn)
    if backend == "fx":
        return chosen
    with _onednn(chosen.onednn):
        compiled = torch.compile(graph, dynamic=False)
    return Runnable(compiled, "inductor", chosen.onednn)


def _traced(function: Function, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of `function`, without what nobody uses, what is computed twice, and what changes nothing.

    Operations in place are replaced first: they would be kept, used or not.
    """
    # Slow to import; an attack traces a few times.
    from torch._functorch.compile_utils import fx_graph_cse
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(functionalize(function, remove="mutations"), tracing_mode="fake")(*inputs)
    for node in graph.graph.nodes:
        if node.op == "call_function" and _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph = fx.GraphModule(graph, fx_graph_cse(graph.graph))
    graph.graph.eliminate_dead_code()
    _drop_unused_gradients(graph)
    graph.recompile()
    return graph


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a node gives its input back: an alias, a first power, a sum over one element, an expansion to itself."""
    if node.target in _PASS_THROUGH:
        return True
    if node.target is torch.ops.aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 1)
    if node.target not in (torch.ops.aten.sum.dim_IntList, torch.ops.aten.expand.default):
        return False
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return before.shape == after.shape and before.dtype == after.dtype


def _drop_unused_gradients(graph: fx.GraphModule) -> None:
    """Tell every convolution's backward to compute only those of its three gradients that somebody uses."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.convolution_backward.default:
            used = {user.args[1] for user in node.users}
            mask = [wanted and place in used for place, wanted in enumerate(node.args[-1])]
            node.args = (*node.args[:-1], mask)


def _choose(function: Function, inputs: Sequence[Tensor], backend: Backend, onednn: bool | None) -> Runnable:
    """With oneDNN or without; left open, without it only where that is clearly faster, so that the choice is stable."""
    usual, other = Runnable(function, backend, True), Runnable(function, backend, False)
    if onednn is not None:
        return usual if onednn else other
    turns = [[_seconds(candidate, inputs) for candidate in (usual, other)] for _ in range(_TRIALS)]
    with_it, without = (min(seconds) for seconds in zip(*turns, strict=True))
    return other if with_it > _CLEARLY * without else usual


def _seconds(candidate: Runnable, inputs: Sequence[Tensor]) -> float:
    start = time.process_time()  # a machine that is busy with other things must not decide
    candidate(*inputs)
    return time.process_time() - start


@contextmanager
def _onednn(enabled: bool) -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
