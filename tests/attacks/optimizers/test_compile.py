from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs
import pytest
import torch
import torch.nn.functional as F
from tests.seeds import replayed
from torch import Tensor, fx
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import grad

from leaktight.attacks.optimizers import compile as compiling
from leaktight.attacks.optimizers.compile import make_runnable
from leaktight.attacks.optimizers.script import Script
from leaktight.core.rng import global_seed


def graph_of(function: object, *inputs: Tensor) -> fx.GraphModule:
    runnable = make_runnable(function, inputs, "fx", onednn=True)  # type: ignore[arg-type]
    assert isinstance(runnable.function, Script)
    return runnable.function.graph


def targets(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_what_changes_nothing_is_left_out() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        unused = x.clone()
        unused.add_(1).mul_(3)  # in place, and for nobody
        y = x.pow(1).sum(0, keepdim=True).expand(1, 3)
        return (y.clone().mul_(2), x.pow(2).sum(1))

    x = torch.rand(1, 3, generator=replayed(0).public())
    graph = graph_of(function, x)
    for found, wanted in zip(graph(x), function(x), strict=True):
        assert torch.equal(found, wanted)
    names = targets(graph)
    assert not [name for name in names if name.split(".")[1].endswith("_")]
    assert sum("pow" in name for name in names) == 1
    assert sum("sum" in name for name in names) == 1
    assert not [name for name in names if "expand" in name or "add" in name]


def test_a_double_backward_computes_no_gradient_that_nobody_uses() -> None:
    """The gradient of a norm of weight gradients, with respect to the input alone."""

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        def norm(here: Tensor) -> Tensor:
            inner = grad(lambda w: F.conv2d(here, w).sigmoid().sum())(weight)
            total: Tensor = inner.square().sum()
            return total

        return (grad(norm)(x),)

    generator = replayed(1).public()
    x, weight = torch.rand(2, 3, 6, 6, generator=generator), torch.rand(4, 3, 3, 3, generator=generator)
    graph = graph_of(function, x, weight)
    torch.testing.assert_close(graph(x, weight)[0], function(x, weight)[0])
    backwards = [node for node in graph.graph.nodes if "convolution_backward" in str(node.target)]
    assert backwards
    for node in backwards:
        assert sum(node.args[-1]) == len({user.args[1] for user in node.users})


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that are compiled from here on, which is only pretended."""
    seen: list[fx.GraphModule] = []

    def pretended(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
        seen.append(graph)
        return graph

    compiling._compilation.cache_clear()
    monkeypatch.setattr(torch._inductor, "compile", pretended)
    return seen


def scaled(factor: float) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda x: (x * factor,)


def test_the_same_graph_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compilations(monkeypatch)
    ones, twos = torch.ones(3), torch.full((3,), 2.0)

    first = make_runnable(scaled(2.0), [ones], "inductor", onednn=True)
    again = make_runnable(scaled(2.0), [twos], "inductor", onednn=True)
    assert len(seen) == 1
    assert again(twos)[0].tolist() == [4.0, 4.0, 4.0]
    assert first.backend == again.backend == "inductor"
    assert make_runnable(scaled(3.0), [ones], "inductor", onednn=True)(ones)[0].tolist() == [3.0, 3.0, 3.0]
    make_runnable(scaled(2.0), [torch.ones(4)], "inductor", onednn=True)
    make_runnable(scaled(2.0), [ones], "inductor", onednn=False)
    assert len(seen) == 4, "another factor, another shape, other convolutions"


def test_sizes_of_a_compiled_graph_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler would take those of real tensors for variables, and failed on networks with batch norm."""
    given: list[Tensor] = []

    def pretended(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
        given.extend(inputs)
        return graph

    compiling._compilation.cache_clear()
    monkeypatch.setattr(torch._inductor, "compile", pretended)
    make_runnable(scaled(3), [torch.ones(2, 5)], "inductor", onednn=True)
    (example,) = given
    assert isinstance(example, FakeTensor)
    assert [type(size) for size in example.shape] == [int, int]


def test_graphs_with_other_fixed_tensors_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compilations(monkeypatch)
    x = torch.ones(2)

    def times(values: list[float]) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return lambda x: (x * torch.tensor(values),)

    for values in ([1.0, 2.0], [1.0, 3.0]):
        found = make_runnable(times(values), [x], "inductor", onednn=True)
        assert found(x)[0].tolist() == values
    assert len(seen) == 2


def test_what_cannot_be_compiled_runs_traced_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> object:
        tried.append(graph)
        raise RuntimeError("no such header\nand more")

    tried: list[fx.GraphModule] = []
    compiling._compilation.cache_clear()
    monkeypatch.setattr(torch._inductor, "compile", broken)
    x = torch.ones(2)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"cannot be compiled and runs traced \(no such header\)"):
            found = make_runnable(scaled(5), [x], "inductor", onednn=True)
        assert found.backend == "fx"
        assert found(x)[0].tolist() == [5.0, 5.0]
    assert len(tried) == 1, "once a process"


def test_compilations_are_kept_in_the_users_cache_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations(monkeypatch)
    x, name = torch.ones(2), "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(name, "/elsewhere")
    make_runnable(scaled(7), [x], "inductor", onednn=True)
    assert os.environ[name] == "/elsewhere"
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda app: Path("/cache") / app)
    for factor, before in enumerate((None, default_cache_dir()), 8):
        monkeypatch.delenv(name) if before is None else monkeypatch.setenv(name, before)
        make_runnable(scaled(factor), [x], "inductor", onednn=True)
        assert os.environ[name] == str(Path("/cache/leaktight/compiled"))


def test_a_compiler_is_looked_for_by_the_name_in_the_environment_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not compiling.has_compiler()
    own = tmp_path / "my-cxx"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert not compiling.has_compiler()
    monkeypatch.setenv("CXX", "my-cxx")
    assert compiling.has_compiler()


def test_random_numbers_are_drawn_twice_where_they_were() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return F.dropout(x), F.dropout(x)

    x = torch.ones(100)
    graph = graph_of(function, x)
    with global_seed(replayed(2)):
        first, second = graph(x)
    with global_seed(replayed(2)):
        wanted = function(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, wanted[0])
    assert torch.equal(second, wanted[1])
