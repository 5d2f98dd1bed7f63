"""Leaktight in a Flower federation: mods for an app of your own, and the apps that `leaktight flower export` writes.

- `defense_mod(defense)`: a defense in your ClientApp.
- `guard_mod(guard, network)`: the guard in your ClientApp, which checks the model before you train on it.
- `record_updates(grid, folder)`: saves the updates that your ServerApp sees, for `leaktight inspect`.
- `server_app(config)`, `client_app(config)`: a whole scenario of Leaktight as Flower apps.
- `node_key(state_dir, client)`: the public key of a node, for the operator's list.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import Config, load_config
from leaktight.config.toml import kind_of, settings_of
from leaktight.core.errors import UsageError
from leaktight.core.keys import parse_key
from leaktight.core.training import LocalTraining
from leaktight.engines.flower.bounded import bounded
from leaktight.engines.flower.guarding import guard_mod
from leaktight.engines.flower.identity import identity_in
from leaktight.engines.flower.keybook import KeyBook
from leaktight.engines.flower.mods import defense_mod
from leaktight.engines.flower.node import NodeSettings
from leaktight.engines.flower.node import client_app as make_client_app
from leaktight.engines.flower.recording import record_updates
from leaktight.engines.flower.server import key_book, make_server_app, play, run_name
from leaktight.engines.inprocess import OnReports
from leaktight.engines.training import train
from leaktight.fl.federation import Federation, FederationState
from leaktight.results.folder import open_run
from leaktight.results.schema import Round

if TYPE_CHECKING:  # Flower itself is first imported by the engine, which switches its telemetry off
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

__all__ = ["client_app", "defense_mod", "guard_mod", "node_key", "record_updates", "server_app"]

LOG = logging.getLogger("leaktight.flower")


def server_app(config: Path | str) -> ServerApp:
    """The ServerApp of a scenario. It continues from the checkpoint in its folder if there is one.

    Its run config: `folder`, the run's folder on the server; `data-root`; `join-seconds`, how long to wait for all
    nodes at the start (default 120); `record`, a folder for the updates that the server sees (empty: not saved);
    `nodes`, a TOML file with the key of each client (empty: the first node that takes a name keeps it);
    `from-round`, the first round to train again, counted from 1 (0: go on after the last; see `leaktight.train`).
    """

    def main(grid: Grid, context: Context) -> None:
        _show_log()
        options = context.run_config
        settings = _config(Path(config), options)
        federation = _federation(settings)
        limited = bounded(grid, federation.limits, federation.plan.timeout)
        recorded = limited
        if options.get("record"):
            recorded = record_updates(limited, str(options["record"]), **_told(settings, federation))
        if not options.get("folder"):
            raise UsageError("expected folder in the run config, got none; add: --run-config 'folder=\"/path/to/run\"'")
        with open_run(Path(str(options["folder"])), settings.to_toml(), resume=True, key=settings.key) as folder:
            federation = federation.keyed(folder.key)
            listed = Path(str(options["nodes"])) if options.get("nodes") else None
            keys = key_book(folder.path / "flower", listed)
            engine = partial(_played, recorded, folder.path / "flower", keys, float(options.get("join-seconds", 120)))
            summary = train(
                federation,
                folder,
                engine=engine,
                defense_kind=kind_of(settings.defense) or "",
                after_round=_log_round,
                keep=settings.plan.keep_checkpoints,
                from_round=int(options.get("from-round", 0)) or None,
            )
        LOG.info("done: accuracy %s, model %s", summary.final.accuracy, summary.model_digest)

    return make_server_app(main)


class _Told(TypedDict):
    """What `record_updates` writes into the command of each note."""

    model: str
    shape: Sequence[int]
    config: Mapping[str, object]
    options: Sequence[str]


def _told(config: Config, federation: Federation) -> _Told:
    """How `leaktight inspect` is told of a scenario: the network, local training and the defense."""
    local = {key: value for key, value in settings_of(config.local).items() if isinstance(value, int | float | str)}
    usual = settings_of(LocalTraining())
    own = {key: value for key, value in local.items() if key in ("epochs", "batch_size") or value != usual.get(key)}
    options = ["--classes", str(federation.dataset.num_classes), "--mode", config.model.mode]
    options += _set("model", settings_of(config.model.source))
    defense = kind_of(config.defense)
    if len(config.defenses) == 1 and defense not in (None, "none"):
        options += ["--defense", str(defense), *_set("defense", settings_of(config.defense))]
    return _Told(
        model=kind_of(config.model.source) or "MODULE:FUNCTION",
        shape=federation.dataset.inputs.shape,
        config=own,
        options=options,
    )


def _set(table: str, settings: Mapping[str, object]) -> list[str]:
    """Settings as options of a command."""
    return [word for key, value in settings.items() for word in ("--set", f"{table}.{key}={json.dumps(value)}")]


def node_key(state_dir: Path, client: str) -> str:
    """The public key by which a server knows a client, of the node with this private folder; made if there is none."""
    return identity_in(state_dir, client).public.hex()


def client_app(config: Path | str) -> ClientApp:
    """The ClientApp of a scenario.

    Its node config: `partition-id` or `client`, which client it is; `state-dir`, the folder of its private state;
    `data-root`; `max-repeats`, in place of that of `[consent]`; `secret-seed`, a key of 64 hexadecimal digits instead
    of the node's own random key, to replay a run in tests (anybody who has it can compute the noise).
    """
    return make_client_app(partial(_home, str(config)))


def _played(
    grid: Grid,
    folder: Path,
    keys: KeyBook,
    join_seconds: float,
    federation: Federation,
    state: FederationState | None = None,
    *,
    workers: int | None = None,
    on_reports: OnReports | None = None,
    **watchers: Any,
) -> FederationState:
    """`engines.flower.server.play` as an `Engine`. workers, on_reports: unused, since clients run elsewhere."""
    name = run_name(folder, resumed=state is not None)
    return play(grid, federation, state, run=name, join_seconds=join_seconds, keys=keys, **watchers)


def _home(config: str, message: Message, context: Context) -> NodeSettings:
    node = context.node_config
    folder, key = node.get("state-dir"), node.get("secret-seed")
    federation = _held(config, str(node.get("data-root", "")))
    if (repeats := node.get("max-repeats")) is not None:
        federation = replace(federation, consent=replace(federation.consent, max_repeats=int(repeats)))
    return NodeSettings(
        federation.keyed(parse_key(str(key))) if key else federation,
        Path(str(folder)) if folder else None,
        reproducible=bool(key),
    )


@lru_cache(maxsize=1)
def _held(config: str, root: str) -> Federation:
    return _federation(_config(Path(config), {"data-root": root}))


def _config(path: Path, options: Mapping[str, object]) -> Config:
    config = load_config(path)
    root = options.get("data-root")
    return replace(config, data_root=Path(str(root))) if root else config


def _federation(config: Config) -> Federation:
    return build_federation(config, *load_data(config))


def _show_log() -> None:
    """Write the log to standard error, which Flower shows."""
    if not LOG.handlers:
        LOG.addHandler(logging.StreamHandler())
        LOG.setLevel(logging.INFO)
        LOG.propagate = False


def _log_round(row: Round) -> None:
    failed = "".join(f"; {client} left out: {reason}" for client, reason in row.failures.items())
    flagged = "".join(f"; {client} is unusual: {flag}" for client, flag in row.flags.items())
    LOG.info("round %s: accuracy %s, %s updates%s%s", row.round, row.accuracy, row.clients, failed, flagged)
