"""The front door: files, config objects and objects of one's own give the same results, and errors are clear."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from tests.seeds import replayed
from torch import Tensor, nn
from torch.nn import functional as F

import leaktight as lt
from leaktight.api.scenario import configure
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Report, Step
from leaktight.core.rng import global_seed
from leaktight.core.types import Params, State

SMALL = {"clients": 10, "kind": "iid"}
QUICK = lt.attacks.CsDlg(iterations=3)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:400, None] / 16, torch.tensor(found.target)[:400]


def network() -> nn.Module:
    with global_seed(replayed(0)):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))


@dataclass(frozen=True, kw_only=True)
class Halved(lt.Defense):
    """A defense of a user: half of every gradient."""

    factor: float = 0.5

    def on_gradient(self, step: Step, state: State, *, rng: lt.Rng, report: Report) -> tuple[Params, State]:
        return {name: self.factor * tensor for name, tensor in step.gradient.items()}, state


def test_an_audit_of_ones_own_model_images_attack_and_defense() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    summary = lt.audit(
        model=model, data=digits(), partition=SMALL, attacks=QUICK, defenses=[Halved()], trials=1, adaptive=False
    )
    assert {(cell.attack, cell.defense) for cell in summary.cells if cell.role == "attack"} == {
        ("csdlg", "none"),
        ("csdlg", f"{__name__}:Halved"),
    }
    assert {verdict.defense for verdict in summary.verdicts} == {"none", f"{__name__}:Halved"}
    assert summary.ledger.init == "given"
    assert summary.run == "runs/audit-001"
    assert Path("runs/audit-001/report.html").is_file()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_kinds_objects_a_config_and_worker_processes_give_the_same_numbers() -> None:
    settings = ["audit.metrics=[]", "secret_seed=" + "ab" * 32]
    named = lt.audit(
        settings=[*settings, "attack.iterations=3"], attacks="csdlg", defenses="none", trials=1, out="a", adaptive=False
    )
    given = lt.audit(settings=settings, attacks=[QUICK], defenses=[lt.Defense()], trials=1, out="b", adaptive=False)
    config = lt.load_config(Path("a/config.toml"), ["secret_seed=" + "ab" * 32])
    again = lt.audit(config, defenses="none", trials=1, out="c", adaptive=False, workers=1)
    assert [cell.scores for cell in named.cells] == [cell.scores for cell in given.cells]
    assert [cell.scores for cell in given.cells] == [cell.scores for cell in again.cells]
    assert Path("a/config.toml").read_text() == Path("b/config.toml").read_text() == Path("c/config.toml").read_text()


def test_training_from_python_and_from_a_file_is_the_same() -> None:
    Path("my.toml").write_text('[partition]\nkind = "iid"\nclients = 3\n[federation]\nrounds = 1\nper_round = 2\n')
    key = ["secret_seed=" + "ab" * 32]
    filed = lt.train("my.toml", settings=key, out="a")
    said = lt.train(
        partition={"kind": "iid", "clients": 3}, federation={"rounds": 1, "per_round": 2}, settings=key, out="b"
    )
    assert filed.model_digest == said.model_digest
    assert said.final.accuracy is not None


def test_an_update_in_memory_is_inspected() -> None:
    images, labels = digits()
    model = network()
    before = copy.deepcopy(model.state_dict())
    loss = F.cross_entropy(model(images[:1]), labels[:1])
    gradient = dict(zip(before, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    summary = lt.inspect(
        model,
        before,
        shape=(1, 8, 8),
        update=gradient,
        kind="gradient",
        labels=labels[:1].tolist(),
        truth=images[:1],
        attacks=[lt.attacks.LinearInversion()],
    )
    assert [verdict.verdict for verdict in summary.verdicts] == ["reconstructed"]


def test_a_tradeoff_trains_and_weighs_each_defense() -> None:
    summary = lt.tradeoff(
        model=network(),
        data=digits(),
        partition=SMALL,
        federation={"rounds": 1, "per_round": 2},
        attacks=QUICK,
        defenses=[Halved()],
        trials=1,
        adaptive=False,
    )
    assert summary.tradeoff is not None
    assert [row.defense for row in summary.tradeoff.rows] == ["none", f"{__name__}:Halved"]
    assert all(row.accuracy is not None for row in summary.tradeoff.rows)


def test_a_run_with_other_weights_or_images_is_not_resumed() -> None:
    def run(model: nn.Module, data: tuple[Tensor, Tensor]) -> object:
        quick = {"partition": SMALL, "attacks": QUICK, "defenses": "none", "trials": 1, "adaptive": False}
        return lt.audit(model=model, data=data, out="run", resume=True, **quick)  # type: ignore[arg-type]

    images, labels = digits()
    run(network(), (images, labels))
    run(network(), (images, labels))
    other = network()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    with pytest.raises(UsageError, match="other settings"):
        run(other, (images, labels))
    with pytest.raises(UsageError, match="other settings"):
        run(network(), (images.flip(0), labels))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "mlp"}, "unknown keyword 'modle'; did you mean 'model'"),
        ({"attacks": [3]}, r"expected a table \[attack\] with a kind, got 3"),
        ({"attacks": ["no_such_module_here:Attack"]}, "expected a module 'no_such_module_here'"),
        ({"attacks": ["collections:OrderedDic"]}, "has no 'OrderedDic'; did you mean 'OrderedDict'"),
        ({"attacks": ["collections:OrderedDict"]}, r"to be a subclass of leaktight\.core\.protocols\.Attack"),
        ({"defenses": [{"kind": "collections:OrderedDict", "size": 3}]}, "takes no settings, got size"),
        ({"defenses": ["math:pi"]}, "expected math:pi to be a class"),
        ({"data": (torch.rand(4, 1, 8, 8) * 3, torch.arange(4))}, r"expected images in \[0, 1\] or bytes"),
        ({"data": (torch.rand(4, 1, 8, 8), torch.rand(4))}, "not supported yet: regression"),
        ({"local": {"epoch": 3}}, "unknown key 'epoch'; did you mean 'epochs'"),
    ],
)
def test_what_makes_no_sense_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        configure(None, options).data.load(Path("data"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": "ten"}, "expected trials to be an integer or 'auto', got 'ten'"),
        ({"trials": 2.0}, "expected trials to be an integer or 'auto', got 2.0"),
        ({"trials": True}, "expected trials to be an integer or 'auto', got True"),
        ({"confidence": "0.05"}, "expected confidence to be a number > 0 and < 1, got '0.05'"),
        ({"budget": "5"}, "or minutes > 0, got '5'"),
    ],
)
def test_an_effort_of_a_wrong_type_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lt.audit(**options)


def test_a_config_object_takes_no_tables_beside_it() -> None:
    with pytest.raises(UsageError, match="expected model inside the Config"):
        lt.audit(lt.load_config(), model="mlp")


def test_public_names_are_listed_and_found() -> None:
    for module in (lt, lt.attacks, lt.defenses):
        assert module.__all__
        for name in module.__all__:
            assert getattr(module, name) is not None
