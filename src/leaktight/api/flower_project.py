"""`leaktight flower export`: a scenario as a project for `flwr run`."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from leaktight import __version__
from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import Config
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.files import write_atomically

PACKAGE = "leaktight_app"

_APP = '''"""The {what} of this project: the scenario in config.toml."""

from pathlib import Path

from leaktight.api.flower import {what}_app

app = {what}_app(Path(__file__).with_name("config.toml"))
'''

_README = """# {clients} clients, {rounds} rounds

A scenario of Leaktight as a Flower project. All settings are in `{package}/config.toml`.

In a simulation on one machine, with a connection of {clients} SuperNodes in `$FLWR_HOME/config.toml`:

    flwr run . simulation --stream --run-config 'folder="/path/to/run"'

On a SuperLink, one SuperNode for each client (`partition-id` from 0 to {last}):

    flower-supernode --superlink HOST:PORT --root-certificates ca.pem --auth-supernode-private-key node0.key \\
        --node-config 'partition-id=0 state-dir="/path/to/state"'
    flwr run . NAME --stream --run-config 'folder="/path/to/run"'

If run again, the server continues from the checkpoint in `folder`, and nodes from their `state-dir`.
Every node loads the data set of the config and uses its own share. Certificates and keys, step by step:
`leaktight docs flower-deployment`.
"""


def export(folder: Path, config: Config) -> int:
    """Write the project into a new or empty folder, and return the number of clients."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"expected a new or empty folder, got {folder}, which has files; choose another")
    clients = len(build_federation(config, *load_data(config)).shares)
    files = {
        "pyproject.toml": tomli_w.dumps(project()),
        "README.md": _README.format(clients=clients, last=clients - 1, rounds=config.plan.rounds, package=PACKAGE),
        f"{PACKAGE}/__init__.py": "",
        f"{PACKAGE}/server.py": _APP.format(what="server"),
        f"{PACKAGE}/client.py": _APP.format(what="client"),
        f"{PACKAGE}/config.toml": config.to_toml(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LeaktightError(f"cannot write to {folder}: {error.strerror}; choose another folder") from error
    for name, content in files.items():
        write_atomically(folder / name, content)
    return clients


def project() -> dict[str, object]:
    """The content of pyproject.toml."""
    return {
        "build-system": {"requires": ["setuptools>=77"], "build-backend": "setuptools.build_meta"},
        "project": {
            "name": "leaktight-app",
            "version": "1.0.0",
            "description": "A scenario of Leaktight on Flower",
            "license": "Apache-2.0",
            "requires-python": ">=3.11.4",
            "dependencies": [f"leaktight[flower]=={__version__}"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "leaktight",
                    "components": {"serverapp": f"{PACKAGE}.server:app", "clientapp": f"{PACKAGE}.client:app"},
                    "config": {
                        "folder": "",
                        "data-root": "",
                        "join-seconds": 120,
                        "record": "",
                        "nodes": "",
                        "from-round": 0,
                    },
                }
            }
        },
    }
