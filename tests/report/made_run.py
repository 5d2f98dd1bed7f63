"""A small run's folder as an audit writes it: two attacks and a control on four defenses, with pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.results.made import changed, made_summary, made_trial

from leaktight.data.embedded import Faces
from leaktight.metrics.image import mse, psnr, ssim
from leaktight.results.schema import (
    Cell,
    Flag,
    FlagPlace,
    Leak,
    Ledger,
    MetricNote,
    Moment,
    Pictures,
    Recommendation,
    Role,
    Score,
    Summary,
    Threat,
    Tradeoff,
    TradeoffRow,
    Trial,
    Verdict,
)

CURIOUS = Threat(server="curious", sees="client", knows=("batch_size", "local_training", "buffers"))
ADAPTIVE = changed(CURIOUS, knows=(*CURIOUS.knows, "defense"))
PUBLIC = changed(CURIOUS, knows=(*CURIOUS.knows, "public_data"))
BATCH, TRIALS = 2, 3
NOISE: Mapping[str, Mapping[str, Sequence[float]]] = {
    "none": {"csdlg": (0.01, 0.02, 0.03), "inverting_gradients": (0.06, 0.05, 0.08)},
    "gaussian_noise": {"csdlg": (0.9, 0.95, 0.8), "inverting_gradients": (0.6, 0.8, 0.7)},
    "outpost": {"csdlg": (0.12, 0.7, 0.8), "inverting_gradients": (0.5, 0.6, 0.65)},
    "precode": {"csdlg": (0.02, 0.03, 0.03), "inverting_gradients": (0.2, 0.3, 0.25)},
}
"""How far a reconstruction is from its original: the share of it that is noise, by defense, attack and trial."""
LEDGER = Ledger(
    labels="given",
    batch_size=BATCH,
    num_examples=BATCH,
    local_steps=1,
    learning_rate=0.05,
    mode="train",
    batch_norm=False,
    buffers_known=True,
    init="wide",
    stage="untrained",
    defense_known=False,
    assumed=(),
)
NOTES = {name: MetricNote(leaks_when="low" if name == "mse" else "high") for name in ("psnr", "mse", "ssim")}
LEAKED = 0.6
"""An SSIM from which a trial counts as leaked."""


@lru_cache(maxsize=1)
def originals() -> np.ndarray:
    """Faces in brown, (N, H, W, 3) bytes."""
    faces = Faces().load(Path()).train
    grey = np.asarray(faces.inputs[faces.targets == 0][:10].permute(0, 2, 3, 1))
    return np.asarray(grey * np.array([1.0, 0.86, 0.7])).astype(np.uint8)


@lru_cache(maxsize=200)
def reconstruction(trial: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray, dict[str, list[float]]]:
    """Originals, the same with noise, and how close they are."""
    truth = originals()[[(trial * BATCH + index) % len(originals()) for index in range(BATCH)]]
    noise = np.random.default_rng(seed).integers(0, 256, truth.shape)
    guess = np.clip((1 - share) * truth + share * noise, 0, 255).astype(np.uint8)
    return truth, guess, scores(guess, truth)


def strip(images: Iterable[np.ndarray]) -> Image.Image:
    return Image.fromarray(np.concatenate(list(images), axis=1))


class MadeRun:
    """Builds the folder step by step; `finish` writes the summary."""

    def __init__(self, path: Path, *, client: str = "client-003", rename: Mapping[str, str] | None = None) -> None:
        self.path, self.client, self.rename = path, client, rename or {}
        self.trials: list[Trial] = []
        (path / "images").mkdir(parents=True)
        (path / "config.toml").write_text('seed = 0\n\n[data]\nkind = "faces"\n\n[local]\nbatch_size = 2\n')
        (path / "command.txt").write_text("leaktight audit --trials 3 --set 'local.batch_size=2'\n")
        environment = {
            "python": "3.11.7",
            "platform": "Linux-6.1-x86_64",
            "processor": "x86_64",
            "packages": {"leaktight": "0.1.0", "torch": "2.13.0"},
            "command": ["leaktight", "audit"],
        }
        (path / "environment.json").write_text(json.dumps(environment))

    def add_all(self) -> MadeRun:
        for defense, attacks in NOISE.items():
            for attack, shares in attacks.items():
                for trial, share in enumerate(shares):
                    self.add(defense, attack, trial, share)
            for trial in range(TRIALS):
                self.add(defense, "prior_only", trial, 1.0, role="control")
        for trial, share in enumerate((0.05, 0.8, 0.7)):
            self.add("outpost", "csdlg", trial, share, adaptive=True)
        self.add("precode", "inverting_gradients", TRIALS, 0.0, error="the update holds values that are not finite")
        return self

    def add(
        self,
        defense: str,
        attack: str,
        trial: int,
        share: float,
        *,
        role: Role = "attack",
        adaptive: bool = False,
        error: str | None = None,
    ) -> None:
        truth, guess, found = reconstruction(trial, share, len(self.trials))
        name = f"{defense}-{attack}-{'adaptive-' if adaptive else ''}{trial}"
        pictures = None
        if error is None:
            pictures = Pictures(
                truth=f"images/{name}-truth.png", guess=f"images/{name}-guess.png", size=(32, 32), count=BATCH
            )
            strip(truth).save(self.path / f"images/{name}-truth.png")
            strip(guess).save(self.path / pictures.guess)
        made = made_trial(
            self.rename.get(defense, defense),
            self.rename.get(attack, attack),
            trial,
            id=name,
            role=role,
            adaptive=adaptive,
            client=self.client,
            status="failed" if error else "done",
            error=error,
            ledger=changed(LEDGER, defense_known=adaptive),
            threat=ADAPTIVE if adaptive else CURIOUS if role == "attack" else PUBLIC,
            scores={} if error else {**found, "lpips_alex": None},
            metrics={} if error else NOTES,
            seconds=2.5,
            images=pictures,
        )
        self.trials.append(made)
        self.write()

    def write(self) -> None:
        """Write the trials again."""
        lines = [json.dumps(trial.document()) + "\n" for trial in self.trials]
        (self.path / "trials.jsonl").write_text("".join(lines))

    def summary(self, *, tradeoff: bool = False, over_time: bool = False) -> Summary:
        groups: dict[tuple[str, str, bool], list[Trial]] = {}
        for trial in self.trials:
            groups.setdefault((trial.defense, trial.attack, trial.adaptive), []).append(trial)
        cells = [cell(group) for group in groups.values()]
        return made_summary(
            *cells,
            run=str(self.path),
            command="leaktight audit",
            scenario={"data": "faces", "model": "lenet_zhu", "clients": 20, "local": {"epochs": 1, "batch_size": 2}},
            metrics=NOTES,
            verdicts=verdicts(cells, self.trials),
            flags=[
                Flag(
                    code="too-few-trials",
                    raised_if="fewer than 10 trials were run",
                    advice="Run again with --trials 10 or more.",
                    detail="3 trials",
                ),
                Flag(
                    code="trials-failed",
                    cell=FlagPlace(attack="inverting_gradients", defense="precode"),
                    raised_if="a trial ended with an error",
                    advice="Read the error of the trial.",
                    detail="1 of 4",
                ),
            ],
            ledger=changed(LEDGER, defense_known="varies"),
            tradeoff=tradeoff_table(cells) if tradeoff else None,
            over_time=moments() if over_time else None,
        )

    def content(self, **options: bool) -> dict[str, Any]:
        """The summary as JSON has it, to be changed."""
        return self.summary(**options).document()

    def finish(self, **options: bool) -> Path:
        (self.path / "summary.json").write_text(json.dumps(self.content(**options)))
        return self.path


def scores(guess: np.ndarray, truth: np.ndarray) -> dict[str, list[float]]:
    left, right = (torch.from_numpy(images / 255.0).permute(0, 3, 1, 2) for images in (guess, truth))
    return {"psnr": psnr(left, right).tolist(), "mse": mse(left, right).tolist(), "ssim": ssim(left, right).tolist()}


def cell(trials: Sequence[Trial]) -> Cell:
    first = trials[0]
    done = [trial for trial in trials if trial.status == "done"]
    leaked = sum((trial.score("ssim") or 0.0) >= LEAKED for trial in done)
    found: dict[str, Score | None] = {"lpips_alex": None, "label_accuracy": None}
    for metric in ("psnr", "mse", "ssim"):
        values = [trial.score(metric) or 0.0 for trial in done]
        spread = 1.96 * float(np.std(values)) / math.sqrt(len(values))
        mean = float(np.mean(values))
        worst = min(values) if metric == "mse" else max(values)
        found[metric] = Score(mean=mean, ci95=(mean - spread, mean + spread), worst=worst)
    return Cell(
        attack=first.attack,
        role=first.role,
        defense=first.defense,
        adaptive=first.adaptive,
        threat=first.threat,
        trials=len(trials),
        failed=len(trials) - len(done),
        success_rate=leaked / len(done) if first.role == "attack" else None,
        control={"psnr": 7.25, "ssim": 0.01},
        seconds=2.5,
        flags=("trials-failed",) if len(done) < len(trials) else (),
        trial_ids=tuple(trial.id for trial in trials),
    ).with_scores({name: found[name] for name in ("psnr", "mse", "ssim", "lpips_alex", "label_accuracy")})


def leak_of(entry: Cell) -> float:
    return entry.worst_of("ssim") or 0.0


def verdicts(cells: Sequence[Cell], trials: Sequence[Trial]) -> list[Verdict]:
    held: dict[tuple[str, Threat], list[Cell]] = {}
    for entry in cells:
        if entry.role == "attack":
            held.setdefault((entry.defense, entry.threat), []).append(entry)
    found = []
    for entries in held.values():
        worst = max(entries, key=leak_of)
        mine = [trial for trial in trials if trial.id in worst.trial_ids and trial.status == "done"]
        rate = max(entry.success_rate or 0.0 for entry in entries)
        found.append(
            Verdict(
                defense=worst.defense,
                threat=worst.threat,
                verdict="leaks" if rate >= 0.5 else "partly" if rate else "not-found",
                because=f"{worst.attack} reached an SSIM of {leak_of(worst):.2f}; "
                f"{round(100 * rate)} % of the trials of one attack or more count as leaked.",
                worst_attack=worst.attack,
                trial_id=max(mine, key=lambda trial: trial.score("ssim") or 0.0).id,
            )
        )
    return found


def tradeoff_table(cells: Sequence[Cell]) -> Tradeoff:
    accuracy = {"none": 0.931, "gaussian_noise": 0.742, "outpost": 0.925, "precode": 0.902}
    cost = {"none": 0.0, "gaussian_noise": 0.01, "outpost": 0.31, "precode": 0.12}
    rows = []
    for defense, reached in accuracy.items():
        attacks = [entry for entry in cells if entry.defense == defense and entry.role == "attack"]
        worst = max(attacks, key=leak_of)
        rows.append(
            TradeoffRow(
                defense=defense,
                settings={},
                leak=Leak(worst=worst.worst_of("ssim"), attack=worst.attack, psnr=worst.worst_of("psnr")),
                accuracy=reached,
                seconds_per_round=1.2 / (1 - cost[defense]),
                cost_share=cost[defense],
                on_front=defense != "precode",
            )
        )
    because = "It leaks least among those that lose less than 2 points of accuracy."
    return Tradeoff(rows=tuple(rows), recommendation=Recommendation(defense="outpost", because=because))


def moments() -> list[Moment]:
    found = []
    for defense, factor in (("none", 1.0), ("outpost", 0.35)):
        for step, accuracy in ((0, 0.1), (10, 0.71), (20, 0.88), (30, 0.92)):
            mean = factor * (34 - 0.6 * step)
            made = Moment(defense=defense, attack="csdlg", adaptive=False, round=step, accuracy=accuracy, trials=3)
            scores = {
                "psnr": Score(mean=mean, ci95=(mean - 2, mean + 2)),
                "ssim": Score(mean=mean / 40, ci95=(mean / 40 - 0.05, mean / 40 + 0.05)),
            }
            found.append(made.with_scores(scores))
    return found
