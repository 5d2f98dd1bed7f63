from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.seeds import replayed
from torch import Tensor, fx
from torch.func import grad

from leaktight.attacks.optimizers.compile import make_runnable
from leaktight.core.rng import global_seed


def graph_of(function: object, *inputs: Tensor) -> fx.GraphModule:
    runnable = make_runnable(function, inputs, "fx", onednn=True)  # type: ignore[arg-type]
    assert isinstance(runnable.function, fx.GraphModule)
    return runnable.function


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
