"""Whole audits in memory: plan, trials, looks and verdicts as in `leaktight audit`, without a folder or pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from leaktight.attacks.controls import MeanImage, PublicImage
from leaktight.audits.cells import gather
from leaktight.audits.experiment import TrialRunner
from leaktight.audits.plan import Experiment
from leaktight.audits.schedule import num_looks, wanted
from leaktight.audits.verdict import Panel
from leaktight.config.audit import build_experiment
from leaktight.config.scenario import load_data
from leaktight.config.settings import load_config
from leaktight.core.protocols import Attack, Defense
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.data.given import GivenDataset
from leaktight.results.schema import Trial, Verdict

KNOWN = ("batch_size", "buffers", "local_training", "public_data")


@dataclass(frozen=True)
class Scene:
    """Audits that differ in their seed alone. batch: examples behind an update. labels: whether they are disclosed.

    network: a kind. size: pixels of a side. clients: of the partition.
    """

    name: str
    attacks: Sequence[Attack]
    defenses: Sequence[Defense] = ()
    batch: int = 1
    partition: Literal["iid", "shards"] = "iid"
    clients: int = 20
    labels: bool = True
    trials: int | Literal["auto"] = "auto"
    network: str = "logistic_regression"
    size: int = 16
    targets: tuple[str, ...] = ()


def verdicts(scene: Scene, seed: int) -> dict[str, Verdict]:
    """The verdicts of one audit, by defense."""
    experiment = experiment_of(scene, seed)
    finished = trials_of(experiment)
    panel = Panel(gather(list(finished.values())), experiment.settings.confidence, num_looks([experiment]))
    return {each.defense: each for each in panel.verdicts()}


def experiment_of(scene: Scene, seed: int) -> Experiment:
    config = load_config(
        None,
        [
            f"audit.local={{samples={scene.batch}, batch_size={scene.batch}, epochs=1}}",
            f"audit.trials={scene.trials}",
            f"audit.targets={list(scene.targets)}",
            "audit.metrics=[]",
        ],
        given={
            "data": GivenDataset(_digits(scene.size)),
            "partition": {"kind": scene.partition, "clients": scene.clients},
            "model": {"kind": scene.network},
            "federation": {"rounds": 1},
            "threat": {"knows": [*KNOWN, *(["labels"] if scene.labels else [])]},
            "seed": seed,
        },
        defenses=[Defense(), *scene.defenses],
        attacks=[*scene.attacks, MeanImage(), PublicImage()],
    )
    key = hashlib.sha256(f"calibration {seed}".encode()).digest()
    return build_experiment(config, *load_data(config), adaptive=False).keyed(key)


def trials_of(experiment: Experiment) -> dict[str, Trial]:
    """All trials that the rule of the audit asks for, by id."""
    runner = TrialRunner(experiment)
    finished: dict[str, Trial] = {}
    while missing := [name for name in wanted([experiment], finished).ids if name not in finished]:
        for name in missing:
            finished[name] = runner(name, lambda report: None).trial
    return finished


@cache
def _digits(size: int) -> Dataset:
    return Digits(size=size).load(Path())
