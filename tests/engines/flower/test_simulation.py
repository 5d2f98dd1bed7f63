"""Flower's simulation beside the in-process engine. Ray is slow to start, so one simulation plays all federations."""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import pytest
from tests.engines.flower.test_play import grid_for, whole
from typer.testing import CliRunner

from leaktight.cli.app import app as command_line
from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import load_config
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Defense, Report, Step
from leaktight.core.rng import Rng
from leaktight.core.tensors import digest
from leaktight.core.types import Params, State
from leaktight.engines import inprocess
from leaktight.engines.flower.messages import read_request
from leaktight.engines.flower.node import NodeSettings, client_app
from leaktight.engines.flower.server import make_server_app, play, run_name
from leaktight.engines.flower.simulation import backend
from leaktight.engines.training import train
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome
from leaktight.results.folder import open_run

from flwr.app import Context, Message  # isort: skip
from flwr.serverapp import Grid  # isort: skip
from flwr.simulation import run_simulation  # isort: skip

SMALL = [
    f"secret_seed={'ab' * 32}",
    "partition={kind='iid', clients=3}",
    "local={epochs=1, batch_size=64, learning_rate=0.05}",
    "federation={rounds=2, per_round=2, aggregator={kind='fedavg', scheme='I'}}",
]
KINDS = ("none", "outpost", "adadefense", "lrp", "fedkl")


@dataclass(frozen=True)
class Hangs(Defense):
    """One client never comes back in time, another one fails."""

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        client = rng.path[rng.path.index("client") + 1]
        if client == "client-001" and not state.get("hung") and step.round == 0:
            time.sleep(40)
        if client == "client-002" and step.round == 1:
            raise ZeroDivisionError("patient 4711")
        return step.gradient, {"hung": True}


def small(kind: str) -> Federation:
    config = load_config(None, SMALL, defenses=[kind])
    return build_federation(config, *load_data(config))


@lru_cache(maxsize=1)
def shipped(path: str) -> dict[str, Federation]:
    federations: dict[str, Federation] = pickle.loads(Path(path).read_bytes())
    return federations


def at_node(path: str, message: Message, context: Context) -> NodeSettings:
    """Every federation of this test by the name of its run; the first says who the node is."""
    federations = shipped(path)
    hello = message.metadata.message_type.endswith("hello")
    return NodeSettings(federations["none" if hello else read_request(message).place.run], None, reproducible=True)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[FederationState, list[RoundOutcome]]]:
    """What one simulation made of every federation."""
    folder = tmp_path_factory.mktemp("simulation")
    federations = {kind: small(kind) for kind in KINDS}
    plan = FederationPlan(rounds=2, min_clients=2, timeout=15)
    faulty = federations["none"].with_defense(Hangs())
    federations["faults"] = replace(faulty, plan=plan)
    path = folder / "federations"
    path.write_bytes(pickle.dumps(federations))
    results: dict[str, tuple[FederationState, list[RoundOutcome]]] = {}

    def main(grid: Grid, context: Context) -> None:
        for name, federation in federations.items():
            outcomes: list[RoundOutcome] = []
            note = partial(lambda to, outcome, state: to.append(outcome), outcomes)
            results[name] = play(grid, federation, run=name, join_seconds=600, after_round=note), outcomes

    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(make_server_app(main), client_app(partial(at_node, str(path))), 3, backend_config=backend(2))
    return results


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_give_the_same_model(
    kind: str, played: Mapping[str, tuple[FederationState, list[RoundOutcome]]]
) -> None:
    outcomes: list[RoundOutcome] = []
    expected = inprocess.run(small(kind), workers=1, after_round=lambda outcome, _: outcomes.append(outcome))
    final, rounds = played[kind]
    largest = max(
        float((tensor - final.server.params[name]).abs().max()) for name, tensor in expected.server.params.items()
    )
    assert largest < 1e-5
    assert whole(final) == whole(expected), "they are equal to the bit"
    assert [each.score for each in rounds] == [each.score for each in outcomes]


def test_who_hangs_or_fails_is_left_out(played: Mapping[str, tuple[FederationState, list[RoundOutcome]]]) -> None:
    final, rounds = played["faults"]
    assert [dict(each.failures) for each in rounds] == [
        {"client-001": "no answer within 15 s"},
        {"client-002": "the client declined; its own log says why"},
    ]
    assert final.server.round == 2


@pytest.mark.timeout(900)
def test_the_command_goes_on_with_a_run_and_ends_in_the_same_model(tmp_path: Path) -> None:
    """The first round was played by a server and nodes that are gone."""
    config = load_config(None, SMALL, defenses=["adadefense"])
    federation = build_federation(config, *load_data(config))
    out = tmp_path / "run"
    with open_run(out, config.to_toml(), resume=False, key=config.key) as folder:
        nodes = grid_for(federation, state_dir=out / "flower" / "clients")
        name = run_name(out / "flower", resumed=False)

        def engine(federation: Federation, state: FederationState | None = None, **watchers: object) -> FederationState:
            del watchers["workers"], watchers["on_reports"]
            return play(nodes, federation, state, run=name, **watchers)  # type: ignore[arg-type]

        train(federation, folder, engine=engine, until=1)
    words = ["train", "--defense", "adadefense", "--out", str(out), "--resume", "--json"]
    words += [word for setting in SMALL for word in ("--set", setting)]
    with pytest.raises(UsageError, match="was started on Flower"):
        CliRunner().invoke(command_line, words, catch_exceptions=False)
    done = CliRunner().invoke(command_line, [*words, "--engine", "flower", "--workers", "2"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    expected = inprocess.run(federation, workers=1).server
    assert summary["model_digest"] == digest({**expected.params, **expected.buffers})
    assert [row["round"] for row in summary["rounds"]] == [1, 2]


def test_another_engines_run_is_not_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was not begun on Flower"):
        run_name(tmp_path, resumed=True)
    first = run_name(tmp_path, resumed=False)
    assert run_name(tmp_path, resumed=True) == first
