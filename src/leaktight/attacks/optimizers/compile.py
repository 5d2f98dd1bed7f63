"""Runs a pure function of tensors eagerly, as a traced graph, or compiled. All three give the same step.

The double backward of a convolution computes weight gradients that are not needed; a traced graph leaves them out.
Parameters, targets and labels are inputs of the graph, so that victims of the same network share one graph (in a
process, by the form of the function) and one compilation: in a process by the text of the graph, across processes and
runs by the compiler's cache, in the user's cache folder.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor, fx
from torch.func import functionalize

from leaktight.attacks.optimizers.form import Form
from leaktight.attacks.optimizers.inductor import compile_graph
from leaktight.attacks.optimizers.script import Script, scripted
from leaktight.core.faults import raise_fault

Backend: TypeAlias = Literal["eager", "fx", "inductor"]
BackendSetting: TypeAlias = Literal["auto"] | Backend
"""What a user may ask for; "auto": traced, or compiled where the work is worth it (`spread.choose_backend`)."""
Function: TypeAlias = Callable[..., tuple[Tensor, ...]]

_PASS_THROUGH = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
_TRIALS = 3
_CLEARLY_FASTER = 1.2


@dataclass(frozen=True)
class Runnable:
    """A function prepared for repeated calls with tensors of the same shapes.

    onednn: whether convolutions use oneDNN, both when it is compiled and when it runs.
    A traced function returns inference tensors, which make its many small operations about 8 % faster; whoever hands
    them on copies them.
    """

    function: Function
    backend: Backend
    onednn: bool

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        untracked = torch.inference_mode() if self.backend == "fx" else torch.no_grad()
        with untracked, _onednn(self.onednn):
            return self.function(*tensors)


def make_runnable(
    function: Function,
    example: Sequence[Tensor],
    backend: Backend,
    onednn: bool | None = None,
    form: Form | None = None,
) -> Runnable:
    """Prepare `function` for tensors of the shapes of `example`, which is not changed.

    form: what the function is made of; one of the same form and shapes is traced once. None: it is traced anew.

    A function that cannot be traced runs eagerly, and one that cannot be compiled runs traced, with a warning that says
    why. Small convolutions are often faster without oneDNN: with `onednn` None a few timed calls decide. The results of
    the two differ in the last bits.
    """
    inputs = [tensor.detach().clone() for tensor in example]  # tracing distinguishes inputs by identity
    if backend == "eager":
        return _choose(function, inputs, backend, onednn)
    try:
        traced = _shared(function, inputs, form)
    except Exception as error:  # tracing can fail with any kind of error
        raise_fault(error)
        warnings.warn(f"this network cannot be traced and runs eagerly ({_reason(error)})", stacklevel=2)
        return _choose(function, inputs, "eager", onednn)
    chosen = _choose(traced.script or traced.graph, inputs, "fx", onednn)
    if backend == "fx":
        return chosen
    compilation = _compilation(_Text.of(traced.graph, inputs), chosen.onednn)
    if compilation.function is None and compilation.failed is None:
        try:
            with _onednn(chosen.onednn):
                compilation.function = compile_graph(traced.graph, inputs)
        except Exception as error:  # so can compiling
            raise_fault(error)
            compilation.failed = _reason(error)
    if compilation.function is not None:
        return Runnable(compilation.function, "inductor", chosen.onednn)
    warnings.warn(f"this network cannot be compiled and runs traced ({compilation.failed})", stacklevel=2)
    return chosen


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which compiled graphs need on a processor: that of CXX, or the usual ones."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@dataclass(frozen=True)
class _Text:
    """A graph as text. Two graphs with the same text compute the same from the same inputs."""

    code: str
    shapes: tuple[str, ...]
    fixed: tuple[str, ...]

    @classmethod
    def of(cls, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> _Text:
        names = sorted({str(node.target) for node in graph.graph.nodes if node.op == "get_attr"})
        fixed = tuple(f"{name} {getattr(graph, name).tolist()!r}" for name in names)
        return cls(graph.code, _shapes(inputs), fixed)


def _shapes(inputs: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(f"{each.dtype} {each.device} {each.shape} {each.stride()}" for each in inputs)


@dataclass(frozen=True)
class _Traced:
    """script: runs the graph with less time between operations; None if the graph cannot be written that way."""

    graph: fx.GraphModule
    script: Script | None

    @classmethod
    def of(cls, function: Function, inputs: Sequence[Tensor]) -> _Traced:
        graph = _traced(function, inputs)
        return cls(graph, scripted(graph))


@dataclass
class _Tracing:
    """traced: None until it is."""

    traced: _Traced | None = None


@lru_cache(maxsize=64)
def _tracing(form: Form, shapes: tuple[str, ...], precision: torch.dtype) -> _Tracing:
    """The place of the graph of a form. precision: PyTorch's default, which new tensors in a function have."""
    return _Tracing()


def _shared(function: Function, inputs: Sequence[Tensor], form: Form | None) -> _Traced:
    """The graph of `function`, traced if no function of the same form was."""
    if form is None:
        return _Traced.of(function, inputs)
    tracing = _tracing(form, _shapes(inputs), torch.get_default_dtype())
    if tracing.traced is None:
        tracing.traced = _Traced.of(function, inputs)
    return tracing.traced


@dataclass
class _Compilation:
    """function: None until it is compiled. failed: why it cannot be compiled, so that nobody tries again."""

    function: Function | None = None
    failed: str | None = None


@lru_cache(maxsize=16)
def _compilation(text: _Text, onednn: bool) -> _Compilation:
    """The place of what is compiled from a graph, with oneDNN as `Runnable` sets it."""
    return _Compilation()


def _traced(function: Function, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of `function` without dead code, repeated computations and identities.

    In-place operations are replaced first, as dead ones would be kept.
    """
    # Imported here because they are slow to import.
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
    """Whether a node returns its input: an alias, a first power, a sum over one element, an expansion to its size."""
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
    """Make every convolution's backward compute only those of its three gradients that are used."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.convolution_backward.default:
            used = {user.args[1] for user in node.users}
            mask = [wanted and place in used for place, wanted in enumerate(node.args[-1])]
            node.args = (*node.args[:-1], mask)


def _choose(function: Function, inputs: Sequence[Tensor], backend: Backend, onednn: bool | None) -> Runnable:
    """With oneDNN or without; if `onednn` is None, without it only if clearly faster, so that the choice is stable.

    On an accelerator it makes no difference.
    """
    usual, other = Runnable(function, backend, True), Runnable(function, backend, False)
    if onednn is not None:
        return usual if onednn else other
    if any(tensor.device.type != "cpu" for tensor in inputs):
        return usual
    turns = [[_seconds(candidate, inputs) for candidate in (usual, other)] for _ in range(_TRIALS)]
    with_it, without = (min(seconds) for seconds in zip(*turns, strict=True))
    return other if with_it > _CLEARLY_FASTER * without else usual


def _seconds(candidate: Runnable, inputs: Sequence[Tensor]) -> float:
    start = time.process_time()  # not wall time: other processes must not influence the choice
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
