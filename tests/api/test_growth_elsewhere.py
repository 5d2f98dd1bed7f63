"""Training runs and inspections grow, and the command line says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.audits.scenes import SMALL
from tests.here import Here
from torch import nn

import leaktight as lt
from leaktight.core.errors import UsageError
from leaktight.core.tensors import parameters_of
from leaktight.results.schema import Summary, TrainingSummary
from leaktight.results.store import read_trials

SECRET = f"secret_seed={'5' * 64}"
CONSTANT = 'local.schedule={kind="constant"}'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    (tmp_path / "small.toml").write_text(SMALL)
    return Here(tmp_path, monkeypatch, capsys)


def train(out: str, *settings: str, **options: Any) -> TrainingSummary:
    return lt.train("small.toml", out=out, settings=[SECRET, *settings], **options)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("defense", ["outpost", "clipping"])
def test_a_training_run_gets_more_rounds(defense: str) -> None:
    train("run", CONSTANT, "federation.rounds=2", defenses=[defense])
    rounds: list[int] = []
    grown = lt.train(out="run", resume=True, settings=["federation.rounds=4"])
    rounds += [row.round for row in grown.rounds]
    whole = train("whole", CONSTANT, "federation.rounds=4", defenses=[defense])
    assert rounds == [1, 2, 3, 4]
    assert grown.model_digest == whole.model_digest
    assert [row.accuracy for row in grown.rounds] == [row.accuracy for row in whole.rounds]
    assert Path("run/config.toml").read_text() == Path("whole/config.toml").read_text()
    assert len(json.loads(Path("run/history.json").read_text())["stages"]) == 1


@pytest.mark.usefixtures("here")
def test_rounds_that_would_change_earlier_ones_are_refused() -> None:
    cosine = 'local.schedule={kind="cosine"}'
    train("run", cosine, "federation.rounds=2")
    with pytest.raises(UsageError) as caught:
        lt.train(out="run", resume=True, settings=["federation.rounds=4"])
    assert (
        "federation.rounds is 2 there and 4 here (with local.schedule cosine the learning rates of finished rounds "
        "depend on it)"
    ) in str(caught.value)
    with pytest.raises(UsageError, match=r"is 2 there and 1 here \(a run does not shrink; --from-round goes back\)"):
        lt.train(out="run", resume=True, settings=["federation.rounds=1"])
    with pytest.raises(
        UsageError,
        match=r"settings: defense is noise \(.*\) there and clipping \(.*\) here \(it changes what is finished\)\. ",
    ):
        lt.train(out="run", resume=True, defenses=["clipping"])


def captured() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Sigmoid(), nn.Linear(8, 10))
    image = torch.rand(1, 1, 8, 8, generator=generator)
    nn.functional.cross_entropy(model(image), torch.tensor([3])).backward()
    gradient = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    before = {name: each.detach() for name, each in parameters_of(model).items()}
    known = {"shape": (1, 8, 8), "update": gradient, "kind": "gradient", "labels": [3], "truth": image}
    return {"model": model, "before": before, **known}


@pytest.mark.usefixtures("here")
def test_an_inspection_gets_more_attacks_and_keeps_its_own() -> None:
    capture = captured()

    def inspect(out: str, *attacks: str, **options: Any) -> Summary:
        return lt.inspect(**capture, attacks=list(attacks), settings=["seed=1"], out=out, **options)

    inspect("run", "linear_inversion")
    before = Path("run/trials.jsonl").read_bytes()
    grown = inspect("run", "linear_inversion", "spear", resume=True)
    assert Path("run/trials.jsonl").read_bytes().startswith(before), "finished trials are not repeated"
    whole = inspect("whole", "linear_inversion", "spear")
    assert [cell.scores for cell in grown.cells] == [cell.scores for cell in whole.cells]
    assert read_trials(Path("run")).keys() == read_trials(Path("whole")).keys()
    with pytest.raises(UsageError, match=r"attack linear_inversion is tried there and left out here"):
        inspect("run", "spear", resume=True)
    capture["labels"] = [4]
    with pytest.raises(UsageError, match=r"inspect.labels is \[3\] there and \[4\] here"):
        inspect("run", "linear_inversion", "spear", resume=True)


def test_the_command_line_grows_the_newest_run_and_records_both_calls(here: Here) -> None:
    quick = ("--no-adaptive", "--workers", "0", "--json")
    code, _, errors = here("audit", "small.toml", "--trials", "1", *quick)
    assert code == 0, errors
    code, out, errors = here("audit", "--resume", "--trials", "2", "--defense", "clipping", *quick)
    assert code == 0, errors
    assert "4 of 12 trials are done already" in errors
    assert "the run grows: audit.trials from 1 to 2; defense clipping (" in errors
    summary = json.loads(out)
    assert {cell["trials"] for cell in summary["cells"]} == {2}
    assert {cell["defense"] for cell in summary["cells"]} == {"none", "noise", "clipping"}
    first, second = Path(summary["run"], "command.txt").read_text().splitlines()
    assert first.startswith("leaktight audit small.toml --trials 1")
    assert second.startswith("leaktight audit --resume --trials 2 --defense clipping")
    assert summary["command"] == f"{first} && {second}"
    code, out, _ = here("verify", summary["run"])
    assert (code, out[:8]) == (0, "verified")
    code, out, errors = here("audit", "--resume", "--trials", "1", *quick)
    assert (code, out) == (2, "")
    assert "audit.trials is 2 there and 1 here" in errors.splitlines()[-1]
    assert here("report", summary["run"])[0] == 0
    page = Path(summary["run"], "report.html").read_text()
    assert "grown-after-a-look" in page
    assert "--trials 2" in page


def test_a_dry_run_of_a_growth_says_what_would_run_and_changes_nothing(here: Here) -> None:
    quick = ("--no-adaptive", "--workers", "0")
    assert here("audit", "small.toml", "--trials", "1", "--out", "run", *quick)[0] == 0
    before = {path.name: path.read_bytes() for path in Path("run").iterdir() if path.is_file()}
    code, _, errors = here("audit", "--out", "run", "--resume", "--trials", "3", "--dry-run", *quick)
    assert code == 0
    assert "12 trials in total" in errors
    assert {path.name: path.read_bytes() for path in Path("run").iterdir() if path.is_file()} == before
