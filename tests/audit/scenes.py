"""An audit small enough to run in a moment, and trials that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leaktight.audit.plan import Experiment
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


def small_config(folder: Path, *overrides: str) -> Config:
    path = folder / "small.toml"
    path.write_text(SMALL)
    return complete(load_config(path, overrides), trials=None, defenses_named=False)


def small_experiment(folder: Path, *overrides: str, adaptive: bool = False) -> Experiment:
    config = small_config(folder, *overrides)
    return build_experiment(config, *load_data(config), adaptive=adaptive)


THREAT = {"server": "curious", "sees": "client", "knows": ["batch_size", "labels"]}


def made_up(
    defense: str,
    attack: str,
    trial: int = 0,
    *,
    ssim: Sequence[float | None] = (0.5,),
    psnr: Sequence[float | None] | None = None,
    role: str = "attack",
    round_index: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """A line of `trials.jsonl` with these scores. PSNR is low unless given."""
    adaptive = bool(changes.get("adaptive", False))
    return {
        "schema_version": 1,
        "id": f"{defense}.{attack}{'.adaptive' if adaptive else ''}.t{trial:03d}.r{round_index:03d}",
        "attack": attack,
        "attack_settings": {},
        "role": role,
        "defense": defense,
        "defense_settings": {},
        "adaptive": adaptive,
        "trial": trial,
        "round": round_index,
        "client": f"client-{trial:03d}",
        "seed": 0,
        "status": "done",
        "error": None,
        "threat": THREAT,
        "ledger": {"labels": "given", "mode": "train"},
        "scores": {"psnr": list(psnr or [5.0] * len(ssim)), "mse": [0.1] * len(ssim), "ssim": list(ssim)},
        "label_accuracy": None,
        "loss": 0.1,
        "first_loss": 1.0,
        "update_changed": defense != "none",
        "model_accuracy": None,
        "seconds": 1.0,
        "images": None,
        "warnings": [],
    } | changes


def panel(
    leaking: float = 0.95, defended: float = 0.3, *, trials: int = 5, blind: float = 0.25, **changes: Any
) -> list[dict[str, Any]]:
    """A good evaluation: an attack that works without a defense and not with one, and a control for every victim."""
    return [
        line
        for trial in range(trials)
        for defense, score in (("none", leaking), ("noise", defended))
        for line in (
            made_up(defense, "csdlg", trial, ssim=[score + 0.001 * trial], **changes),
            made_up(defense, "mean_image", trial, ssim=[blind], role="control"),
        )
    ]
