"""One node among many that stalls, lies, floods or takes the name of another."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.engines.flower.grids import StallingGrid, nodes

from leaktight.engines.flower.node import NodeSettings, client_app
from leaktight.engines.flower.server import play
from leaktight.fl.federation import Federation
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome

MakeFederation = Callable[..., Federation]


def test_a_node_that_stalls_loses_nobody_elses_update(make_federation: MakeFederation) -> None:
    federation = make_federation(plan=FederationPlan(rounds=2, min_clients=1, timeout=1.5))
    app = client_app(lambda message, context: NodeSettings(federation, None, True))
    grid = StallingGrid(
        app,
        nodes(len(federation.shares)),
        lambda sent: sent.metadata.message_type == "train" and sent.metadata.dst_node_id == 1000,
    )
    outcomes: list[RoundOutcome] = []
    began = time.monotonic()
    play(grid, federation, run="a", after_round=lambda outcome, _: outcomes.append(outcome))
    for outcome in outcomes:
        assert set(outcome.failures) == {"client-000"}
        assert "no answer within 1.5 s" in outcome.failures["client-000"]
    assert time.monotonic() - began < 12
