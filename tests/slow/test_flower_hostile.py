"""One try of the fault campaign on a real SuperLink: hostile nodes and a stolen name."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.faults import flower
from tests.engines.flower.deployment import Deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("part", [flower.hostile_nodes, flower.stolen_names, flower.strangers])
def test_one_hostile_node_harms_nobody_else(part: flower.Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "TRIES", 1)
    with Deployment(tmp_path / "deployment") as deployment:
        deployment.start_superlink()
        counts = list(part(deployment, tmp_path))
    assert [count.fault for count in counts if count.held != count.tried] == []
