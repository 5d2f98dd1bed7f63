"""An audit small enough to run in a moment."""

from __future__ import annotations

from pathlib import Path

from leaktight.audits.plan import Experiment
from leaktight.config.audit import build_experiment, complete
from leaktight.config.scenario import load_data
from leaktight.config.settings import Config, load_config

SMALL = """
seed = 3
[data]
kind = "digits"
size = 8
[partition]
kind = "iid"
clients = 4
[model]
kind = "lenet_zhu"
activation = "sigmoid"
init = "wide"
[local]
epochs = 1
batch_size = 64
learning_rate = 0.2
[federation]
rounds = 3
per_round = 2
[threat]
knows = ["batch_size", "buffers", "labels", "local_training"]
[audit]
trials = 2
metrics = []
[audit.local]
samples = 1
batch_size = 1
[[defense]]
kind = "noise"
[[attack]]
kind = "csdlg"
iterations = 1
backend = "eager"
[[attack]]
kind = "mean_image"
"""
"""One attack, one control, one defense, two victims: eight trials of a fraction of a second."""


def small_config(folder: Path, *overrides: str, more: str = "") -> Config:
    """more: TOML after that of the scene."""
    path = folder / "small.toml"
    path.write_text(SMALL + more)
    return complete(load_config(path, overrides), trials=None, defenses_named=False)


def small_experiment(folder: Path, *overrides: str, adaptive: bool = False) -> Experiment:
    config = small_config(folder, *overrides)
    return build_experiment(config, *load_data(config), adaptive=adaptive)
