"""What an attack cannot win: by many guesses for one example, or by what it knows without the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from tests.audits.scenes import small_experiment

from leaktight.audits.experiment import TrialRunner
from leaktight.audits.plan import AttackEntry, Experiment
from leaktight.audits.trial import judge, oracle_of
from leaktight.core.protocols import Attack, Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.metrics import Resources, build_metrics
from leaktight.results.schema import Trial

BLIND = (
    "threat.knows=['batch_size', 'buffers', 'labels', 'local_training', 'public_data']",
    "data.size=16",
    "audit.trials=20",
    "partition.clients=20",
    "local.batch_size=8",
    "attack={kind='csdlg', iterations=1}",
)


@dataclass(frozen=True, kw_only=True)
class Many(Attack):
    """An attack that hands in the public images, grey first."""

    number: int = 512

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        public = seen[0].public_data
        assert public is not None
        images = public.inputs.repeat(3, 1, 1, 1)[: self.number].clone()
        images[0] = 0.5
        return Reconstruction(Batch(images, torch.zeros(len(images), dtype=torch.long)), 0.0)


@dataclass(frozen=True, kw_only=True)
class OfTheClass(Attack):
    """An attack that knows the label and never looks at the update."""

    shown: Literal["mean", "random"]

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        public, labels = seen[0].public_data, seen[0].labels
        assert public is not None
        assert labels is not None
        generator = rng.child("pick").public()
        images = []
        for label in labels.tolist():
            own = public.inputs[public.targets == label]
            pick = int(torch.randint(len(own), (1,), generator=generator))
            images.append(own.mean(0) if self.shown == "mean" else own[pick])
        return Reconstruction(Batch(torch.stack(images), labels.clone()), 0.0)


def trials_of(experiment: Experiment, name: str) -> list[Trial]:
    runner = TrialRunner(experiment)
    specs = [spec for spec in experiment.trials if spec.attack.name == name and spec.defense.name == "none"]
    return [runner(spec.id, print).trial for spec in specs]


def test_guesses_beyond_the_number_of_examples_are_cut_in_the_attacks_own_order(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, *BLIND, "audit.trials=1")
    found = {}
    for number in (1, 512):
        many = replace(experiment, attacks=(AttackEntry("many", {}, Many(number=number)),))
        (found[number],) = trials_of(many, "many")
    assert found[512].error is None
    assert found[512].guesses == 512
    assert found[1].guesses == 1
    assert found[512].scores == found[1].scores, "only the first, grey guess counts"
    assert found[512].rank == found[1].rank


@pytest.mark.parametrize("shown", ["mean", "random"])
def test_who_only_knows_the_label_does_not_beat_the_controls(tmp_path: Path, shown: Literal["mean", "random"]) -> None:
    experiment = small_experiment(tmp_path, *BLIND).keyed(b"k" * 32)
    controls = [entry for entry in experiment.attacks if entry.role == "control" and entry.name != "prior_only"]
    attack = AttackEntry("of_the_class", {}, OfTheClass(shown=shown))
    experiment = replace(experiment, attacks=(attack, *controls))
    blind = trials_of(experiment, "of_the_class")
    best = [trials_of(experiment, entry.name) for entry in controls]
    above = {
        metric: [
            (trial.score(metric) or 0.0, (trial.score(metric) or 0.0) - max(each.score(metric) or 0.0 for each in same))
            for trial, *same in zip(blind, *best, strict=True)
        ]
        for metric in ("ssim", "psnr")
    }
    assert all(trial.error is None for trials in (blind, *best) for trial in trials)
    seeming = sum(
        (ssim >= 0.6 and gain >= 0.2) or (psnr >= 20 and louder >= 6)
        for (ssim, gain), (psnr, louder) in zip(above["ssim"], above["psnr"], strict=True)
    )
    assert seeming == 0


@dataclass(frozen=True, kw_only=True)
class Writes(Attack):
    """An attack that overwrites everything that it is given."""

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        (one,) = seen
        assert one.public_data is not None
        given = (
            *one.public_data.inputs.unsqueeze(0),
            *one.broadcast.params.values(),
            *one.update.tensors.values(),
            *one.model.parameters(),
        )
        for tensor in given:
            tensor.detach().zero_()
        return Reconstruction(Batch(one.inputs.blank(1, torch.zeros(1)), torch.zeros(1, dtype=torch.long)), 0.0)


def test_what_an_attack_writes_reaches_neither_the_judge_nor_other_trials(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, *BLIND, "audit.trials=1", "model.init='default'").keyed(b"k" * 32)
    control = next(entry for entry in experiment.attacks if entry.name == "mean_image")
    (alone,) = trials_of(replace(experiment, attacks=(control,)), "mean_image")
    runner = TrialRunner(replace(experiment, attacks=(AttackEntry("writes", {}, Writes()), control)))
    writes, beside = [runner(f"none.{name}.t000.r000", print).trial for name in ("writes", "mean_image")]
    assert writes.error is None
    assert writes.update_changed is False
    assert beside.scores == alone.scores


@dataclass(frozen=True, kw_only=True)
class Shows(Attack):
    """An attack without a search whose guess has this value in every pixel."""

    value: float

    @property
    def searches(self) -> bool:
        return False

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        image = seen[0].inputs.blank(1, torch.zeros(1)) + self.value
        return Reconstruction(Batch(image, torch.zeros(1, dtype=torch.long)), 0.0)


@pytest.mark.parametrize(
    ("value", "valid"), [(1e30, True), (torch.inf, False), (-torch.inf, False), (torch.nan, False)]
)
def test_a_guess_that_is_not_finite_makes_no_valid_trial(tmp_path: Path, value: float, valid: bool) -> None:
    experiment = small_experiment(tmp_path, *BLIND, "audit.trials=1")
    (trial,) = trials_of(replace(experiment, attacks=(AttackEntry("shows", {}, Shows(value=value)),)), "shows")
    assert trial.error is None
    assert (trial.fault is None) is valid


def test_the_oracle_does_not_prefer_a_guess_that_is_not_finite() -> None:
    truth, label = torch.rand(1, 1, 8, 8), torch.tensor([3])
    metrics = build_metrics(["psnr"], Resources(root=Path()))
    broken, whole = Batch(truth * torch.nan, label), Batch(1 - truth, label)
    found = Reconstruction(broken, 0.0, notes={"chosen": "a"}, others={"b": whole})
    oracle = oracle_of(found, Batch(truth, label), judge(broken, Batch(truth, label), metrics), metrics)
    assert oracle is not None
    assert oracle.attack == "b"
