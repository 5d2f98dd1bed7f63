"""A network of the user's own, and the check that it fits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.core.errors import ModelError
from leaktight.core.inputs import Images
from leaktight.core.tasks import Penalised
from leaktight.models.initialise import build_model
from leaktight.models.source import check_fits
from leaktight.models.user import UserModel

SHAPE = Images(1, 4, 4)

CODE = """
import torch
from torch import nn
from leaktight_test_helper import WIDTH

def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

def fitted(num_classes, shape, extra=WIDTH):
    assert shape.height == 4 and extra == 7
    return nn.Sequential(nn.Flatten(), nn.Linear(shape.channels * shape.height * shape.width, num_classes))

def anything(**settings):
    return plain() if set(settings) == {"shape", "num_classes"} else None

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.linear = nn.Linear(16, num_classes)

    def forward(self, inputs):
        return self.linear(inputs.flatten(1))

def greedy(shape, depth, *, width):
    return plain()

def wrong():
    return 3

def failing(num_classes):
    raise KeyError("weights\\nare gone")

number = 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module of networks that is on no import path."""
    (tmp_path / "leaktight_test_nets.py").write_text(CODE)
    (tmp_path / "leaktight_test_helper.py").write_text("WIDTH = 7\n")
    (tmp_path / "leaktight_test_broken.py").write_text("import leaktight_test_absent\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("leaktight_test_")]:
        del sys.modules[name]


@pytest.mark.parametrize("function", ["plain", "fitted", "anything", "Net"])
def test_functions_get_what_they_ask_for(folder: Path, function: str) -> None:
    before = list(sys.path)
    source = UserModel(target=f"leaktight_test_nets:{function}")
    model = build_model(source, SHAPE, 3, rng=replayed(0))
    check_fits(model, SHAPE, 3)
    assert sys.path == before
    again = build_model(source, SHAPE, 3, rng=replayed(0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("leaktight_test_nowhere:build", "expected a module 'leaktight_test_nowhere'"),
        ("leaktight_test_nowhere.deep:build", "expected a module 'leaktight_test_nowhere.deep'"),
        ("leaktight_test_broken:build", "cannot import 'leaktight_test_broken'.*leaktight_test_absent"),
        ("leaktight_test_nets:plane", "no 'plane'; did you mean 'plain'"),
        ("leaktight_test_nets:number", "to be a function, got int"),
        ("leaktight_test_nets:wrong", "return a torch.nn.Module, got int"),
        ("leaktight_test_nets:greedy", "got depth, width; give the others a default"),
        ("leaktight_test_nets:failing", "failed: KeyError.*gone"),
    ],
)
def test_errors_say_what_to_correct(folder: Path, target: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        UserModel(target=target).build(SHAPE, 3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("target", ["", "nets", "nets:", ":build"])
def test_target_must_name_a_module_and_a_function(target: str) -> None:
    with pytest.raises(ValueError, match=r"package\.module:name"):
        UserModel(target=target)


class Returns(nn.Module):
    """Gives the same thing for every input."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self, inputs: Tensor) -> object:
        return self.value


def test_check_fits_accepts_a_penalty() -> None:
    check_fits(Returns(Penalised(torch.zeros(2, 3), torch.zeros(2))), SHAPE, 3)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Returns(torch.zeros(2, 4)), "expected a model with 3 outputs, got 4"),
        (Returns(torch.zeros(2, 3, 1)), "not supported yet: sequences .*2 x 3 x 1"),
        (Returns({"logits": torch.zeros(2, 3)}), "got a dict of logits; return only the logits"),
        (nn.Sequential(nn.Flatten(), nn.Linear(17, 3)), "takes images of 1x4x4"),
    ],
)
def test_check_fits_refuses(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        check_fits(model, SHAPE, 3)
    assert "\n" not in str(error.value)
