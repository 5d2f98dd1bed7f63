"""Every import of the project that the canonical runs need. When a file moves, this is the one module to edit."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.adaptive.scenes import play
from tests.attacks import tampered as malicious
from tests.attacks.generative.test_ggl import scene as made_scene
from tests.attacks.generators import CONDITIONAL, LINEAR
from tests.attacks.scenes import draw, observe
from tests.audits.scenes import SMALL
from tests.engines.flower.grids import LocalGrid, nodes
from tests.report.made_run import MadeRun
from tests.seeds import replayed

from leaktight.adaptive.table import adapt
from leaktight.cli.app import main
from leaktight.config.catalogue import CATALOGUE
from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import load_config
from leaktight.core.protocols import Attack, Defense
from leaktight.core.tensors import buffers_of, digest, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, UpdateKind
from leaktight.data.dataset import Dataset
from leaktight.engines import inprocess
from leaktight.engines.flower.node import NodeSettings, client_app
from leaktight.engines.flower.server import play as play_on_flower
from leaktight.fl.federation import Federation, FederationState
from leaktight.models.initialise import build_model

__all__ = [
    "CONDITIONAL",
    "LINEAR",
    "SMALL",
    "Attack",
    "Batch",
    "Dataset",
    "Defense",
    "LocalTraining",
    "MadeRun",
    "Observation",
    "UpdateKind",
    "adapted",
    "buffers_of",
    "build_model",
    "command",
    "digest",
    "draw",
    "federation_of",
    "in_process",
    "made",
    "made_scene",
    "malicious",
    "names",
    "observe",
    "on_flower",
    "parameters_of",
    "play",
    "replayed",
]


def names(family: str) -> list[str]:
    """The names of a family of the catalogue: "attacks", "defenses", "models" and so on."""
    return list(CATALOGUE[family])


def made(family: str, kind: str, **settings: Any) -> Any:
    """A method of the catalogue with these settings."""
    return CATALOGUE[family][kind](**settings)


def adapted(attack: Attack, defense: Defense) -> Attack:
    """The attacker who knows the defense."""
    found = adapt(attack, defense)
    assert found is not None
    return found


def command(folder: Path, *arguments: str) -> str:
    """What a `leaktight` command prints on standard output, run in this process and in that folder."""
    out, errors = StringIO(), StringIO()
    environment = {**os.environ, "LEAKTIGHT_DATA": str(folder / "data"), "COLUMNS": "200"}
    with (
        chdir(folder),
        patch.object(sys, "argv", ["leaktight", *arguments]),
        patch.object(sys, "path", list(sys.path)),
        patch.dict(os.environ, environment),
        redirect_stdout(out),
        redirect_stderr(errors),
    ):
        code = 0
        try:
            main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    assert code == 0, errors.getvalue()
    return out.getvalue()


def federation_of(toml: str, *overrides: str) -> Federation:
    """The federation of a config, with `table.key=value` laid over it."""
    config = load_config(scenario=toml, overrides=overrides)
    return build_federation(config, *load_data(config))


def in_process(federation: Federation) -> Mapping[str, Any]:
    """Training without a network."""
    scores: list[Any] = []
    final = inprocess.run(federation, workers=1, after_round=lambda outcome, _: scores.append(outcome.score))
    return _trained(final, scores)


def on_flower(federation: Federation) -> Mapping[str, Any]:
    """The same on Flower, with nodes that answer in this process."""
    scores: list[Any] = []
    app = client_app(lambda message, context: NodeSettings(federation, None, True))
    grid = LocalGrid(app, nodes(len(federation.shares)))
    final = play_on_flower(grid, federation, run="a", after_round=lambda outcome, _: scores.append(outcome.score))
    return _trained(final, scores)


def _trained(final: FederationState, scores: list[Any]) -> Mapping[str, Any]:
    return {
        "params": dict(final.server.params),
        "buffers": dict(final.server.buffers),
        "scores": [{"accuracy": score.accuracy, "loss": score.loss} for score in scores],
    }
