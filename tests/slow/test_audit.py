"""Audits that take minutes: a scenario in which nothing can be concluded, and a Ray cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.audits.scenes import small_experiment
from tests.results.made import changed

from leaktight.audits.plan import Experiment
from leaktight.audits.run import run_audit
from leaktight.config.audit import build_experiment, complete
from leaktight.config.scenario import load_data
from leaktight.config.settings import load_config
from leaktight.results.folder import RunFolder
from leaktight.results.schema import Summary
from leaktight.results.store import read_trials
from leaktight.runtime.cluster import Ray
from leaktight.runtime.executor import Executor
from leaktight.runtime.processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TRAINED_RESNET = """
[data]
kind = "photos"
[partition]
kind = "iid"
clients = 5
[model]
kind = "resnet20"
[local]
epochs = 1
batch_size = 32
learning_rate = 0.05
[federation]
rounds = 3
per_round = 2
[threat]
knows = ["batch_size", "buffers", "labels", "local_training"]
[audit]
trials = 3
attack_round = 2
metrics = []
[audit.local]
samples = 32
[[defense]]
kind = "noise"
[[attack]]
kind = "inverting_gradients"
iterations = 60
learning_rate = 0.1
"""


def run(experiment: Experiment, folder: Path, executor: Executor) -> Summary:
    folder.mkdir()
    return run_audit(experiment, RunFolder(folder), executor=executor, scenario={}, command="")


def test_a_trained_resnet_in_training_mode_with_large_batches_cannot_be_concluded_on(tmp_path: Path) -> None:
    path = tmp_path / "resnet.toml"
    path.write_text(TRAINED_RESNET)
    config = complete(load_config(path), trials=None, defenses_named=False)
    summary = run(build_experiment(config, *load_data(config), adaptive=False), tmp_path / "run", Processes())
    assert summary.ledger.batch_norm is True
    assert summary.ledger.num_examples == 32
    assert summary.ledger.stage == "after 2 rounds"
    assert {each.verdict for each in summary.verdicts} == {"cannot-conclude"}
    assert "attack-failed-undefended" in {flag.code for flag in summary.flags}


def test_a_ray_cluster_gives_the_same_trials(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'leaktight[ray]'")
    experiment = small_experiment(tmp_path)
    found = {}
    for name, executor in (("local", Processes()), ("ray", Ray())):
        run(experiment, tmp_path / name, executor)
        found[name] = {key: changed(trial, seconds=0.0) for key, trial in read_trials(tmp_path / name).items()}
    assert len(found["ray"]) == 8
    assert found["ray"] == found["local"]
