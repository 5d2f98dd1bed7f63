"""One round of an exported project on a real SuperLink and SuperNode; tests/slow has the longer ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.engines.flower.deployment import Deployment
from typer.testing import CliRunner

from leaktight.cli.app import app
from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import load_config
from leaktight.core.tensors import digest
from leaktight.engines import inprocess


def export(folder: Path, *settings: str, config: str = "") -> Path:
    (folder / "my.toml").write_text(config)
    overrides = [word for setting in settings for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["flower", "export", str(folder / "project"), str(folder / "my.toml"), *overrides])
    assert done.exit_code == 0, done.output
    return folder / "project"


KEY = bytes(range(32))
CONFIG = """
[partition]
kind = "iid"
clients = 1
[local]
epochs = 1
[federation]
rounds = 1
per_round = 1
[defense]
kind = "noise"
noise_std = 0.01
"""


def test_an_exported_project_holds_the_scenario_and_no_more(tmp_path: Path) -> None:
    project = export(tmp_path, "federation.rounds=7", config=CONFIG)
    config = load_config(project / "leaktight_app" / "config.toml")
    assert config.plan.rounds == 7
    assert config.to_toml() == (project / "leaktight_app" / "config.toml").read_text()
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert files == {
        "README.md",
        "pyproject.toml",
        "leaktight_app/__init__.py",
        "leaktight_app/client.py",
        "leaktight_app/config.toml",
        "leaktight_app/server.py",
    }
    again = CliRunner().invoke(app, ["flower", "export", str(project)])
    assert again.exit_code != 0
    assert "expected a new or empty folder" in str(again.exception)


@pytest.mark.timeout(900)
def test_a_round_on_a_superlink_with_tls_and_a_node_with_a_key(tmp_path: Path) -> None:
    project = export(tmp_path, config=CONFIG)
    with Deployment(tmp_path / "deployment") as deployment:
        deployment.start_superlink()
        deployment.start_node(0, f'secret-seed="{KEY.hex()}"')
        state = deployment.run(project, f'folder="{tmp_path / "run"}" join-seconds=300')
        assert state["status"] == "finished:completed", deployment.log("node0").read_text()[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    config = load_config(project / "leaktight_app" / "config.toml")
    federation = build_federation(config, *load_data(config)).keyed(KEY)
    expected = inprocess.run(federation, workers=1).server
    assert summary["model_digest"] == digest({**expected.params, **expected.buffers})
    (private,) = (tmp_path / "deployment" / "state0").glob("*.state")
    assert private.stat().st_mode & 0o777 == 0o600
