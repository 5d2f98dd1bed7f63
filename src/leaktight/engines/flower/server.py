"""The server's side on Flower: `fl.protocol` over a grid, and the name of the run."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from leaktight.core.errors import UsageError
from leaktight.core.files import write_atomically
from leaktight.engines.flower.carrier import GridCarrier
from leaktight.engines.flower.keybook import KeyBook, read_keys
from leaktight.engines.inprocess import AfterRound, Carrier, RoundWork
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.protocol import RoundOutcome, carry, federate
from leaktight.runtime.executor import Inline
from leaktight.runtime.processes import one_thread

LOG = logging.getLogger("leaktight.flower")

JOIN_SECONDS = 120.0


def play(
    grid: Grid,
    federation: Federation,
    state: FederationState | None = None,
    *,
    run: str,
    join_seconds: float = JOIN_SECONDS,
    after_round: AfterRound | None = None,
    after_client: Callable[[], None] = lambda: None,
    until: int | None = None,
    keys: KeyBook | None = None,
) -> FederationState:
    """Run the remaining rounds with the nodes of a grid. The clients keep their private states.

    run: the name of the run, the same as in the call that returned `state`. join_seconds: the longest time to wait for
    the nodes of all clients. The rest as in `engines.inprocess.run`, but without the clients' own figures, which no
    message contains. keys: by which clients are known, with those of earlier calls; None: those of their first nodes in
    this call.
    """
    server = (state or federation.first_state()).server
    carrier = GridCarrier(
        grid,
        sorted(federation.shares),
        run,
        federation.plan.timeout,
        epoch=server.round,
        after_client=after_client,
        limits=federation.limits,
        keys=KeyBook() if keys is None else keys,
    )

    def finished(outcome: RoundOutcome) -> None:
        for client, flag in outcome.flags.items():
            LOG.warning("round %d: the update of %s is unusual: %s", outcome.broadcast.round + 1, client, flag)
        if after_round is not None:
            after_round(outcome, FederationState(outcome.state))
        carrier.begin_epoch(outcome.state.round)

    with one_thread(), Inline().start(RoundWork(federation)) as workers:
        score = Carrier(federation, workers).score
        conversation = federate(federation.server, server, evaluate=score, after_round=finished, until=until)
        carrier.gather(join_seconds)
        return FederationState(carry(conversation, carrier.exchange))


def make_server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    app = ServerApp()
    app.main()(main)
    return app


def key_book(folder: Path, listed: Path | None = None) -> KeyBook:
    """The clients' keys in this folder of the server: of first use, or listed in a file of the operator."""
    return KeyBook(folder / "keys.json", None if listed is None else read_keys(listed))


def run_name(folder: Path, *, resumed: bool) -> str:
    """The name of the run in this folder of the server; drawn once. resumed: True if the run must exist."""
    path = folder / "run"
    if path.exists():
        return path.read_text().strip()
    if resumed:
        raise UsageError(f"the run beside {folder} was not begun on Flower; resume it with --engine inprocess")
    name = secrets.token_hex(8)
    write_atomically(path, name)
    return name
