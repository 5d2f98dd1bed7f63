from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.seeds import replayed
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from leaktight.attacks.optimizers.compile import make_runnable
from leaktight.attacks.optimizers.script import Script, scripted

Function = Callable[..., tuple[Tensor, ...]]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    total: Tensor = grad(lambda w: F.conv2d(x, w, padding=1).relu().square().sum())(weight).square().sum()
    return total


def _ends(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Numbers without an end, new tensors, and a tensor without a dimension."""
    limits = x.new_full((2,), float("-inf")), torch.zeros(3, dtype=torch.float64), x.sum().reshape(())
    return (*limits, x.clamp(max=0.5).masked_fill(x > 0.9, float("nan")))


FUNCTIONS: dict[str, Function] = {
    "double_backward": lambda x, weight: (grad(_norm)(x, weight),),
    "side_by_side": lambda x, weight: (vmap(grad(_norm), in_dims=(0, None))(torch.stack([x, 2 * x]), weight),),
    "held": lambda x, weight: (x * torch.tensor([0.1, 0.2, 0.3])[:, None, None], weight),
    "several": lambda x, weight: (*x.max(1), *x.split(1, 1), x.pow(2.5), 3 - x, x / 3),
    "ends": _ends,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_a_script_gives_every_bit_of_its_graph(name: str, precision: torch.dtype) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(precision)

    generator = replayed(3).public()
    example = draw(2, 3, 5, 5), draw(4, 3, 3, 3)
    runnable = make_runnable(FUNCTIONS[name], example, "fx", onednn=True)
    assert isinstance(runnable.function, Script)
    other = draw(2, 3, 5, 5), draw(4, 3, 3, 3)
    for found, wanted in zip(runnable(*other), runnable.function.graph(*other), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_an_operation_of_ones_own_has_no_script_and_runs_traced() -> None:
    @torch.library.custom_op("leaktight_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    x = torch.ones(2)
    assert scripted(make_fx(lambda x: (twice(x),))(x)) is None
    runnable = make_runnable(lambda x: (twice(x),), [x], "fx", onednn=True)
    assert runnable.backend == "fx"
    assert runnable(x)[0].tolist() == [2.0, 2.0]


def test_nothing_is_optimised_by_torchscript_and_its_setting_is_left_as_it_was() -> None:
    before = torch._C._get_graph_executor_optimize()
    runnable = make_runnable(lambda x: (x @ x + x @ x.T,), [torch.ones(2, 2)], "fx", onednn=True)
    runnable(torch.ones(2, 2))
    assert torch._C._get_graph_executor_optimize() == before
