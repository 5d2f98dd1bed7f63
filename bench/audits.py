"""Whole audits in memory: plan, trials, looks and verdicts as in `leaktight audit`, without a folder or pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from leaktight.attacks.controls import MeanImage, PublicImage
from leaktight.audits.experiment import TrialRunner
from leaktight.audits.judge.cells import gather
from leaktight.audits.judge.verdict import Panel
from leaktight.audits.plan import Experiment
from leaktight.audits.schedule import num_looks, wanted
from leaktight.config.audit import build_experiment
from leaktight.config.scenario import load_data
from leaktight.config.settings import load_config
from leaktight.core.errors import LeaktightError
from leaktight.core.protocols import Attack, Defense
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.data.given import GivenDataset
from leaktight.results.schema import Trial, Verdict

CLIENTS = 20
NETWORK = "logistic_regression"
"""One linear layer: its updates show a single example exactly, which makes attacks of any strength."""
KNOWN = ("batch_size", "buffers", "local_training", "public_data")


@dataclass(frozen=True)
class Scene:
    """Audits that differ in their seed alone, of digits.

    batch: examples behind an update. labels: whether they are disclosed. targets: clients to attack; all if empty.
    size: pixels of a side.
    """

    name: str
    attacks: Sequence[Attack]
    defenses: Sequence[Defense] = ()
    partition: Literal["iid", "shards"] = "iid"
    batch: int = 1
    labels: bool = True
    trials: int | Literal["auto"] = "auto"
    controls: Sequence[Attack] = (MeanImage(), PublicImage())
    targets: tuple[str, ...] = ()
    size: int = 16


def verdicts(scene: Scene, seed: int) -> list[Verdict]:
    """The verdicts of one audit."""
    experiment = experiment_of(scene, seed)
    cells = gather(trials_of(experiment))
    return Panel(cells, experiment.settings.confidence, num_looks([experiment])).verdicts()


def chances(scene: Scene, seed: int, victims: Sequence[int]) -> list[float]:
    """Of the only attack on undefended updates, the chance that identifies its first so and so many victims."""
    trials = trials_of(experiment_of(scene, seed))
    cells = [gather([trial for trial in trials if trial.trial < number])[0] for number in victims]
    return [1.0 if cell.identification is None else cell.identification for cell in cells]


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
            "partition": {"kind": scene.partition, "clients": CLIENTS},
            "model": {"kind": NETWORK},
            "federation": {"rounds": 1},
            "threat": {"knows": [*KNOWN, *(["labels"] if scene.labels else [])]},
            "seed": seed,
        },
        defenses=[Defense(), *scene.defenses],
        attacks=[*scene.attacks, *scene.controls],
    )
    key = hashlib.sha256(f"calibration {seed}".encode()).digest()
    return build_experiment(config, *load_data(config), adaptive=False).keyed(key)


def trials_of(experiment: Experiment) -> list[Trial]:
    """All trials that the rule of the audit asks for."""
    runner = TrialRunner(experiment)
    finished: dict[str, Trial] = {}
    while missing := [name for name in wanted([experiment], finished).ids if name not in finished]:
        for name in missing:
            finished[name] = runner(name, lambda report: None).trial
    failed = [trial.error for trial in finished.values() if trial.status == "failed"]
    if failed:
        raise LeaktightError(f"expected trials without errors, got {failed[0]}")
    return list(finished.values())


@cache
def _digits(size: int) -> Dataset:
    return Digits(size=size).load(Path())
