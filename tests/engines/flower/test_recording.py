"""The command in the note of a captured exchange: it says what is known, and runs as it is."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from tests.engines.flower.test_play import grid_for
from typer.testing import CliRunner

from leaktight.api.flower import _federation, _told
from leaktight.cli.app import app as command_line
from leaktight.config.settings import load_config
from leaktight.engines.flower.recording import record_updates
from leaktight.engines.flower.server import play

SCENARIO = """
[data]
kind = "digits"
size = 8
[partition]
kind = "iid"
clients = 3
[model]
kind = "lenet_zhu"
activation = "sigmoid"
[local]
epochs = 2
batch_size = 4
samples = 10
learning_rate = 0.2
momentum = 0.5
[federation]
rounds = 1
per_round = 3
[defense]
kind = "noise"
noise_std = 0.02
"""


def test_the_note_of_leaktights_own_run_is_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    config = load_config(path)
    federation = _federation(config)
    play(record_updates(grid_for(federation), tmp_path / "captured", **_told(config, federation)), federation, run="a")
    note = json.loads(next((tmp_path / "captured").glob("*/*/note.json")).read_text())
    command = shlex.split(note["inspect"])
    for words in (
        ("--model", "lenet_zhu"),
        ("--shape", "1,8,8"),
        ("--batch-size", "10"),
        ("--local", "learning_rate=0.2"),
        ("--local", "epochs=2"),
        ("--local", "momentum=0.5"),
        ("--defense", "noise"),
        ("--set", "defense.noise_std=0.02"),
    ):
        assert words in set(pairwise(command))
    monkeypatch.chdir(tmp_path)
    quick = ["--attack", "csdlg", "--set", "attack.iterations=1", "--workers", "0"]
    done = CliRunner().invoke(command_line, [*command[1:], *quick], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "captured update" in done.output
