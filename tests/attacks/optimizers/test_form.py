"""Functions of the same form share a graph; whatever could change the graph makes another form."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx, nn

from leaktight.attacks.optimizers import compile as compiling
from leaktight.attacks.optimizers.compile import Function, make_runnable
from leaktight.attacks.optimizers.form import form_of


@dataclass(frozen=True)
class Settings:
    scale: float = 1.0


class Scaled(nn.Module):
    """A network with a weight, and a tensor that is neither parameter nor buffer."""

    def __init__(self, number: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.mean = nn.Buffer(torch.zeros(3))
        self.fixed = torch.full((3,), number)


def made(scale: float) -> type:
    return type("Same", (), {"__module__": __name__, "scale": scale})


def test_equal_parts_have_equal_forms() -> None:
    network = Scaled()
    trained = deepcopy(network)
    with torch.no_grad():
        trained.weight.add_(1)
        trained.mean.add_(1)
    assert form_of((network, Settings(), "x")) == form_of((trained, Settings(), "x"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Settings(1.0), Settings(1.0 + 1e-15)),
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (Scaled(1.0), Scaled(2.0)),
        (Scaled().train(), Scaled().eval()),
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
        (nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3, stride=2)),
        ([1, 2], (1, 2)),
        (lambda x: x, lambda x: 2 * x),
        (made(1.0), made(2.0)),
    ],
    ids=["number", "values", "precision", "other-tensor", "mode", "slope", "stride", "kind", "function", "class"],
)
def test_whatever_can_change_a_graph_changes_the_form(one: object, other: object) -> None:
    assert form_of(one) is not None
    assert form_of(one) != form_of(other)


def test_what_cannot_be_compared_has_no_form() -> None:
    assert form_of(threading.Lock()) is None


def test_a_graph_is_traced_once_for_each_form_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    trace = compiling._traced

    def counted(function: Function, inputs: Sequence[Tensor]) -> fx.GraphModule:
        traced.append(1)
        return trace(function, inputs)

    monkeypatch.setattr(compiling, "_traced", counted)

    def run(scale: float, x: Tensor) -> list[float]:
        runnable = make_runnable(lambda x: (scale * x,), [x], "fx", True, form_of(("test", scale)))
        found: list[float] = runnable(x)[0].tolist()
        return found

    ones = torch.ones(2)
    assert [run(2.5, ones), run(2.5, 2 * ones), run(3.5, ones)] == [[2.5, 2.5], [5.0, 5.0], [3.5, 3.5]]
    assert len(traced) == 2
    run(2.5, torch.ones(3))
    run(2.5, ones.double())
    assert len(traced) == 4
    make_runnable(lambda x: (x,), [ones], "fx", True)
    make_runnable(lambda x: (x,), [ones], "fx", True)
    assert len(traced) == 6
