from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from tests.audits.scenes import small_experiment
from tests.report.made_run import MadeRun
from tests.results.made import made_cell, made_summary, made_training, made_trial

from leaktight.audits.run import run_audit
from leaktight.metrics import METRICS
from leaktight.report.comparison import compare
from leaktight.report.html import write_report
from leaktight.report.latex import to_latex
from leaktight.report.runs import load_run
from leaktight.report.tables import to_csv, to_markdown
from leaktight.results.__main__ import schemas
from leaktight.results.folder import RunFolder
from leaktight.results.schema import (
    MetricNote,
    Record,
    Score,
    Summary,
    Threat,
    TrainingSummary,
    Trial,
    common_ledger,
    parse,
)
from leaktight.results.store import read_trials
from leaktight.runtime.executor import Inline

DOCS = Path(__file__).parents[2] / "docs" / "schema"
OLD = Path(__file__).parent / "old"
"""Results as commit 868b462 wrote them: an audit over time, a trade-off, two inspections, a training run, failures."""


def documents(run: Path) -> Iterator[tuple[str, type[Record], str]]:
    """The documents of a run's folder: the name of their schema, their type and their text."""
    text = (run / "summary.json").read_text()
    trained = "model_digest" in json.loads(text)
    yield ("training", TrainingSummary, text) if trained else ("summary", Summary, text)
    if not trained:
        yield from (("trial", Trial, line) for line in (run / "trials.jsonl").read_text().splitlines())


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real audit over time with a trade-off."""
    folder = tmp_path_factory.mktemp("audit")
    experiment = small_experiment(folder, "audit.every=2", "audit.trials=1", "model.init=default")
    run_audit(experiment, RunFolder(folder), executor=Inline(), scenario={}, command="", weigh=True, workers=1)
    return folder


def test_the_published_schemas_are_those_of_the_types() -> None:
    assert {path.name: path.read_text() for path in DOCS.glob("*.json")} == schemas(), (
        "write them again: python -m leaktight.results docs/schema"
    )


def test_what_runs_write_follows_the_published_schemas(audited: Path) -> None:
    for folder in (audited, audited / "training" / "noise"):
        for name, _, text in documents(folder):
            jsonschema.validate(json.loads(text), json.loads((DOCS / f"{name}.json").read_text()))
    wrong = made_trial().document() | {"scores": {"psnr": ["much"]}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, json.loads((DOCS / "trial.json").read_text()))


@pytest.mark.parametrize("run", sorted(OLD.iterdir()), ids=lambda run: run.name)
def test_old_results_are_read_and_written_again_without_loss(run: Path) -> None:
    words = {"leaks": "reconstructed", "partly": "identified", "not-found": "nothing-found"}
    for _, kind, text in documents(run):
        expected = json.loads(text)
        for verdict in expected.get("verdicts", ()):
            verdict["verdict"] = words.get(verdict["verdict"], verdict["verdict"])
        assert parse(kind, text, run.name).document() == expected


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", sorted(run.name for run in OLD.iterdir() if run.name != "train"))
def test_old_results_are_rendered_finished_or_not(name: str, finished: bool, tmp_path: Path) -> None:
    for file in ("summary.json", "trials.jsonl") if finished else ("trials.jsonl",):
        (tmp_path / file).write_bytes((OLD / name / file).read_bytes())
    assert "csdlg" in write_report(tmp_path).read_text()
    assert all(form([load_run(tmp_path)]) for form in (to_markdown, to_csv, to_latex))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("said", [True, False], ids=["said", "old file"])
def test_every_reader_sees_a_metric_leak_the_way_it_says(metric: str, said: bool, tmp_path: Path) -> None:
    direction = METRICS[metric].leaks_when
    notes = {metric: MetricNote(leaks_when=direction)} if said else {}
    trials = [made_trial(trial=at, scores={metric: [score]}, metrics=notes) for at, score in enumerate((1.0, 2.0))]
    summary = made_summary(made_cell(**{metric: Score(mean=1.5, worst=1.0)}), metrics=notes)
    runs = []
    for name in ("a", "b"):
        made = MadeRun(tmp_path / name)
        made.trials = trials
        made.write()
        runs.append(load_run(made.path))
    assert summary.leaks_when(metric) == direction
    assert runs[0].summary.cells[0].worst_of(metric) == (2.0 if direction == "high" else 1.0)
    (table,) = [table for table in compare(runs).tables if "leaks more" in table.note]
    assert f"{'Higher' if direction == 'high' else 'Lower'} leaks more" in table.note


def test_a_new_metric_needs_no_table_here(tmp_path: Path) -> None:
    notes = {"my_error": MetricNote(leaks_when="low")}
    made = MadeRun(tmp_path / "run")
    made.trials = [made_trial(trial=at, scores={"my_error": [1.0 + at]}, metrics=notes) for at in range(2)]
    made.write()
    assert load_run(made.path).summary.cells[0].worst_of("my_error") == 1.0


def test_records_are_values() -> None:
    trial = made_trial(
        loss=float("nan"), scores={"psnr": [float("inf"), 3.0]}, attack_settings={"a": (1, float("inf"))}
    )
    assert (trial.loss, trial.scores["psnr"], trial.score("psnr")) == (None, (None, 3.0), 3.0)
    assert trial.attack_settings == {"a": [1, None]}
    with pytest.raises(ValueError, match="frozen"):
        Trial.__setattr__(trial, "loss", 1.0)
    one, other = (Threat(server="curious", sees="client", knows=("labels",)) for _ in range(2))
    assert {one: 1}[other] == 1
    assert parse(Trial, json.dumps(trial.document()), "") == trial


def test_an_infinite_budget_is_kept() -> None:
    training = made_training(0.5, [1.0])
    told = training.document() | {"defense": {"kind": "dp", "epsilon": float("inf")}}
    assert parse(TrainingSummary, json.dumps(told), "").defense.figures == {"epsilon": float("inf")}


def test_a_cell_takes_metrics_and_nothing_else() -> None:
    with pytest.raises(ValueError, match="pnsr"):
        made_cell(pnsr=3)
    assert made_cell(my_metric=Score(mean=1.0), ssim=None).scores == {"my_metric": Score(mean=1.0)}


def test_the_ledger_says_what_all_attacks_share() -> None:
    ledgers: list[dict[str, str]] = [{"labels": "given", "mode": "train"}, {"labels": "searched", "mode": "train"}, {}]
    trials = [made_trial(trial=at, ledger=ledger) for at, ledger in enumerate(ledgers)]
    assert common_ledger(trials).facts() == {"labels": "varies", "mode": "train"}
    assert common_ledger([]).facts() == {}


def test_results_are_read_without_torch() -> None:
    code = (
        "import sys, leaktight.results.store, leaktight.results.folder, leaktight.results.__main__; "
        "from pathlib import Path; leaktight.results.store.read_trials(Path(sys.argv[1])); "
        "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, OLD / "audit"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert len(read_trials(OLD / "audit")) == 10
