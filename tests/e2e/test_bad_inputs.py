"""Bad inputs of a newcomer: one clear line, exit code 2, nothing done. Lazy modules are materialised."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.faults.hostile.case import Case
from tests.e2e.bad_inputs import CASES, MODULE, fault, own_network, said
from tests.here import Here
from tests.seeds import replayed
from torch import nn

import leaktight as lt
from leaktight.core.errors import UsageError
from leaktight.core.rng import global_seed

IMAGES = torch.rand(60, 1, 8, 8, generator=replayed(0).public())
LABELS = torch.arange(60) % 4
PLAIN = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
SMALL = {"kind": "iid", "clients": 5}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_it_is_one_clear_line(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKTIGHT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "argv", sys.argv)
    code, errors = said(case, tmp_path)
    assert not fault(case, code, errors), errors
    assert not (tmp_path / "runs").exists()


class Given(nn.Module):
    """Gives what a function makes of the logits."""

    def __init__(self, give: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear, self.give = nn.Linear(64, 4), give

    def forward(self, inputs: torch.Tensor) -> object:
        return self.give(self.linear(inputs.flatten(1)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": (torch.rand(60, 13), LABELS)}, "not supported yet: tables"),
        ({"data": (torch.randint(9, (60, 13)), LABELS)}, "not supported yet: tokens"),
        ({"data": (IMAGES, torch.rand(60))}, "not supported yet: regression"),
        ({"data": (IMAGES, torch.zeros(60, 4).long())}, "not supported yet: multi-label"),
        ({"data": (IMAGES, torch.zeros(60, 8, 8).long())}, "not supported yet: segmentation"),
        ({"data": (IMAGES, torch.zeros(60, 2, 4))}, "not supported yet: detection"),
        ({"data": (IMAGES[:, 0], LABELS)}, r"for grey images give images\[:, None\]"),
        ({"data": (IMAGES.expand(-1, 4, -1, -1), LABELS)}, "1 or 3 channels, got 4"),
        ({"data": (IMAGES, torch.zeros(60).long())}, "2 or more classes"),
        ({"data": [(image, 1) for image in IMAGES]}, "expected data as a pair .* got a list of 60"),
        ({"data": IMAGES}, "expected data as a pair .* got a Tensor"),
        ({"model": nn.Linear}, "expected model as a torch.nn.Module"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 1))}, "not supported yet: regression"),
        ({"model": nn.Conv2d(1, 4, 1)}, "not supported yet: segmentation"),
        ({"model": Given(lambda out: [{"boxes": out}])}, "not supported yet: detection"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 5))}, "expected a model with 4 outputs, got 5"),
    ],
)
def test_python_says_the_same(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    for call in (lt.audit, lt.train, lt.tradeoff):
        with pytest.raises(UsageError, match=message) as error:
            call(**{"model": PLAIN, "data": (IMAGES, LABELS), "partition": SMALL, **given})
        assert "\n" not in str(error.value)
        assert "tensor(" not in str(error.value)
    assert not list(tmp_path.iterdir())


def lazy() -> nn.Sequential:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(4))


@pytest.mark.parametrize("command", ["audit", "tradeoff", "train"])
def test_lazy_modules_are_materialised(command: str, here: Here, tmp_path: Path) -> None:
    own_network(tmp_path)
    np.savez("data.npz", images=IMAGES.numpy(), labels=LABELS.numpy())
    data = ["--set", "data.kind=arrays", "--set", "data.path=data.npz", "--set", "partition.kind=iid"]
    small = ["--set", "partition.clients=5", "--set", "local.batch_size=2", "--set", "federation.per_round=2"]
    code, _, errors = here(
        command, *data, *small, "--set", f"model.kind={MODULE}:lazy", "--set", "model.init=wide", "--dry-run"
    )
    sys.modules.pop(MODULE, None)
    assert (code, "Traceback" in errors) == (0, False), errors


def test_lazy_modules_train_in_memory_and_the_callers_own_stays_lazy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own, settings = lazy(), ["secret_seed=" + "ab" * 32]
    digests = [
        lt.train(
            model=own,
            data=(IMAGES.numpy(), LABELS.numpy()),
            partition=SMALL,
            local={"batch_size": 2, "learning_rate": 0.1},
            federation={"rounds": 1, "per_round": 2},
            settings=settings,
            out=name,
        ).model_digest
        for name in ("a", "b")
    ]
    assert digests[0] == digests[1]
    assert isinstance(own[3], nn.LazyLinear)


def test_a_lazy_model_is_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with global_seed(replayed(1)):
        full = lazy().eval()
        full(IMAGES[:1])
    before = {name: tensor.clone() for name, tensor in full.state_dict().items()}
    loss = nn.functional.cross_entropy(full(IMAGES[:1]), LABELS[:1])
    names = [name for name, _ in full.named_parameters()]
    gradient = dict(zip(names, torch.autograd.grad(loss, list(full.parameters())), strict=True))
    quick = lt.attacks.CsDlg(iterations=2)
    summary = lt.inspect(lazy(), before, shape=(1, 8, 8), update=gradient, kind="gradient", mode="eval", attacks=quick)
    assert not summary.cells[0].failed
    with pytest.raises(UsageError, match=r"before: .*lazy.*run the model once"):
        lt.inspect(lazy(), lazy().state_dict(), shape=(1, 8, 8), update=gradient, kind="gradient", attacks=quick)
