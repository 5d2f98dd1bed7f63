"""A federation in Flower's simulation: one node for every client, on this machine or on a Ray cluster."""

from __future__ import annotations

import logging
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import ConfigRecordValues, Context, Message
from flwr.serverapp import Grid
from flwr.simulation import run_simulation

from leaktight.core.errors import LeaktightError
from leaktight.engines.flower.node import NodeSettings, client_app, read_reports
from leaktight.engines.flower.server import key_book, make_server_app, play, run_name
from leaktight.engines.inprocess import AfterRound, OnReports
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.protocol import RoundOutcome
from leaktight.runtime.processes import num_processes

START_SECONDS = 600.0
"""The longest time for Ray to start."""


def simulate(
    federation: Federation,
    state: FederationState | None = None,
    *,
    folder: Path,
    workers: int | None = None,
    after_round: AfterRound | None = None,
    on_reports: OnReports = lambda reports: None,
    after_client: Callable[[], None] = lambda: None,
    until: int | None = None,
) -> FederationState:
    """Run the remaining rounds in Flower's simulation; the result is that of `engines.inprocess.run`.

    folder: of the clients' private states, a file for each, and of the name of the run.
    workers: processes for the clients; None: one per core. It does not change the result.
    """
    run, clients = run_name(folder, resumed=state is not None), folder / "clients"
    final: list[FederationState] = []

    def finished(outcome: RoundOutcome, now: FederationState) -> None:
        on_reports(read_reports(clients, outcome.updates, outcome.broadcast.round))
        if after_round is not None:
            after_round(outcome, now)

    def main(grid: Grid, context: Context) -> None:
        final.append(
            play(
                grid,
                federation,
                state,
                run=run,
                join_seconds=START_SECONDS,
                after_round=finished,
                after_client=after_client,
                until=until,
                keys=key_book(folder),
            )
        )

    with federation_in_file(federation, clients) as load, _quiet():
        run_simulation(make_server_app(main), client_app(load), len(federation.shares), backend_config=backend(workers))
    if not final:
        raise LeaktightError("Flower's simulation ended without a result; see its log")
    return final[0]


def backend(workers: int | None) -> dict[str, dict[str, ConfigRecordValues]]:
    """Settings of Ray: one process per worker, and no log."""
    cores = num_processes(workers)
    return {
        "init_args": {"num_cpus": cores, "logging_level": logging.ERROR, "log_to_driver": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }


@contextmanager
def federation_in_file(federation: Federation, state_dir: Path) -> Iterator[Callable[[Message, Context], NodeSettings]]:
    """A function that loads the settings of a node from a temporary file, once per process.

    Flower sends the ClientApp with every message, so the examples must not be part of it.
    """
    with tempfile.TemporaryDirectory(prefix="leaktight-") as temporary:
        path = Path(temporary) / "federation"
        path.write_bytes(pickle.dumps(federation))
        yield partial(_load, str(path), str(state_dir.resolve()))


def _load(path: str, state_dir: str, message: Message, context: Context) -> NodeSettings:
    return NodeSettings(_read_federation(path), Path(state_dir), reproducible=True)


@lru_cache(maxsize=1)
def _read_federation(path: str) -> Federation:
    """Reads only what `federation_in_file` wrote, in a folder that only this user can write to."""
    federation: Federation = pickle.loads(Path(path).read_bytes())
    return federation


@contextmanager
def _quiet() -> Iterator[None]:
    """Limit Flower's log to errors."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
