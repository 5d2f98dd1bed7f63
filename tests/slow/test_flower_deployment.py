"""Real deployments on this machine: SuperLink, SuperNodes, TLS, keys, a killed node, a restart of everything."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.engines.flower.deployment import Deployment, wait_for
from tests.engines.flower.test_deployment import export

from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import load_config
from leaktight.core.tensors import digest
from leaktight.engines import inprocess
from leaktight.results.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KEY = bytes(range(32))
REPLAYED = f'secret-seed="{KEY.hex()}"'
FOUR = """
[partition]
kind = "iid"
clients = 4
[local]
epochs = 20
learning_rate = 0.1
[federation]
rounds = 2
per_round = 4
min_clients = 3
timeout = 400
"""

STATEFUL = """
[partition]
kind = "iid"
clients = 2
[local]
epochs = 1
[federation]
rounds = 3
per_round = 2
[[defense]]
kind = "outpost"
[[defense]]
kind = "adadefense"
learning_rate = 0.01
"""


def test_four_nodes_learn_digits_a_stranger_is_refused_and_one_is_killed(tmp_path: Path) -> None:
    project = export(tmp_path, config=FOUR)
    with Deployment(tmp_path / "deployment") as deployment:
        deployment.start_superlink()
        for place in range(4):
            deployment.start_node(place, REPLAYED)
        deployment.start_node(4, register=False)
        stranger, victim = deployment.log("node4"), deployment.log("node3")
        run = deployment.submit(project, f'folder="{tmp_path / "run"}" join-seconds=600')
        wait_for(lambda: victim.read_text().count("Receiving: train message") == 2, 1800, victim)
        deployment.stop("node3", signal.SIGKILL)
        state = deployment.end(run, 1800)
        assert state["status"] == "finished:completed", deployment.log("superlink").read_text()[-3000:]
        assert "Failed to activate SuperNode" in stranger.read_text()
        assert "SuperNode ID" not in stranger.read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["clients"] for row in summary["rounds"]] == [4, 3]
    assert list(summary["rounds"][1]["failures"]) == ["client-003"]
    assert summary["final"]["accuracy"] > 0.9


def test_a_restarted_superlink_and_restarted_nodes_end_in_the_same_model(tmp_path: Path) -> None:
    project, folder = export(tmp_path, config=STATEFUL), tmp_path / "run"
    config = load_config(project / "leaktight_app" / "config.toml")
    expected = inprocess.run(build_federation(config, *load_data(config)).keyed(KEY), workers=1).server
    said = f'folder="{folder}" join-seconds=600'
    with Deployment(tmp_path / "deployment") as deployment:
        names = ["superlink", "node0", "node1"]
        deployment.start_superlink()
        for place in range(2):
            deployment.start_node(place, REPLAYED)
        deployment.submit(project, said)
        # Round 1 is stored, and a node has trained round 2 already.
        log = deployment.log("node0")
        wait_for(lambda: log.read_text().count("Sending: train message") == 2, 1800, log)
        for name in names:
            deployment.stop(name, signal.SIGKILL)
        played = RunFolder(folder).checkpoints[-1]
        assert 1 <= played < 3
        deployment.start_superlink()
        for place in range(2):
            deployment.restart_node(place, REPLAYED)
        state = deployment.run(project, said, 1800)
        assert state["status"] == "finished:completed", deployment.log("superlink").read_text()[-3000:]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["model_digest"] == digest({**expected.params, **expected.buffers})
