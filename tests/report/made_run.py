"""A small run's folder as an audit writes it: two attacks and a control on four defenses, with pictures.

`add_production` adds a second track with two defenses.
"""

from __future__ import annotations

import json
import math
from collections import Counter
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
    WORDS,
    Answer,
    AttackerVerdict,
    Cell,
    Flag,
    FlagPlace,
    Leak,
    Ledger,
    MetricNote,
    Moment,
    Pictures,
    Rank,
    Recommendation,
    Role,
    Score,
    Significance,
    Spending,
    Summary,
    Threat,
    Track,
    Tradeoff,
    TradeoffRow,
    Trial,
    Verdict,
    Word,
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
PRODUCTION: Mapping[str, tuple[Word, Sequence[float]]] = {
    "none": ("identified", (0.6, 0.55, 0.65)),
    "outpost": ("labels-read", (0.95, 0.9, 1.0)),
}
"""The verdicts of the second track, and how far its reconstructions are from their originals."""
STUCK = ("gaussian_noise", "inverting_gradients", 2)
"""A trial whose own loss did not fall."""
ANSWER = Answer(
    leaks="An undefended update gives away its training images: csdlg reconstructed 3 of 3 victims.",
    to_whom="A server that follows the protocol and sees each client's update; it knows the batch size, the local "
    "training and the buffers.",
    how_sure="Nothing found means: none of 3 victims, so fewer than 63 % of all with 95 % confidence, by attacks that "
    "work without the defense. Attacks that ignore the update would be taken for a leak in at most 5 % of runs.",
    helps="Nothing was found behind: gaussian_noise. Not enough: outpost (identified by who knows it) and precode "
    "(reconstructed).",
    costs="Time of a client's round: gaussian_noise about the same, outpost x 1.4 and precode x 1.1. Accuracy was not "
    "measured; `leaktight tradeoff` measures it.",
)
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

    def add_production(self) -> MadeRun:
        """The second track."""
        for defense, (_, shares) in PRODUCTION.items():
            for trial, share in enumerate(shares):
                self.add(defense, "agic", trial, share, track="production")
                self.add(defense, "prior_only", trial, 1.0, role="control", track="production")
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
        track: Track = "diagnostic",
    ) -> None:
        truth, guess, found = reconstruction(trial, share, len(self.trials))
        before = "production." if track == "production" else ""
        name = f"{before}{defense}-{attack}-{'adaptive-' if adaptive else ''}{trial}"
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
            ledger=changed(LEDGER, defense_known=adaptive, local_steps=1 if track == "diagnostic" else 20),
            threat=ADAPTIVE if adaptive else CURIOUS if role == "attack" else PUBLIC,
            scores={} if error else {**found, "lpips_alex": None},
            metrics={} if error else NOTES,
            track=track,
            rank=None
            if error or role == "control"
            else Rank(place=1 if share < (0.75 if before else 0.45) else 40, decoys=99),
            loss=1.0 if (defense, attack, trial) == STUCK else 0.1,
            examples=f"{trial:016x}",
            guesses=BATCH,
            client_seconds=0.8,
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
        groups: dict[tuple[str, str, str, bool], list[Trial]] = {}
        for trial in self.trials:
            groups.setdefault((trial.track, trial.defense, trial.attack, trial.adaptive), []).append(trial)
        cells = [cell(group) for group in groups.values()]
        return made_summary(
            *cells,
            run=str(self.path),
            command="leaktight audit",
            scenario={"data": "faces", "model": "lenet_zhu", "clients": 20, "local": {"epochs": 1, "batch_size": 2}},
            metrics=NOTES,
            answer=ANSWER,
            leaked_if="if one example is closer than every guess without the update and every decoy",
            confidence=0.15,
            spending=Spending(trials=len(self.trials), planned=120, minutes=3.4, ended="decided"),
            digest="5eed" * 16,
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
    attack = first.role == "attack"
    faults = Counter(trial.fault for trial in trials if trial.fault is not None)
    valid = [trial for trial in trials if trial.fault is None]
    leaked = sum((trial.score("ssim") or 0.0) >= LEAKED for trial in valid)
    found: dict[str, Score | None] = {"lpips_alex": None, "label_accuracy": None}
    for metric in ("psnr", "mse", "ssim"):
        values = [trial.score(metric) or 0.0 for trial in valid]
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
        track=first.track,
        valid=len(valid),
        victims=len(valid) if attack else None,
        faults=dict(faults.items()),
        reconstructed=leaked if attack else None,
        success_rate=leaked / len(valid) if attack else None,
        identification=identification(valid) if attack else None,
        label_reading=Significance(victims=3, chance=1e-9, corrected=1e-8)
        if (first.attack, leaked) == ("agic", 0)
        else None,
        control={"psnr": 7.25, "ssim": 0.01},
        seconds=2.5,
        flags=("trials-failed",) if len(done) < len(trials) else (),
        trial_ids=tuple(trial.id for trial in trials),
    ).with_scores({name: found[name] for name in ("psnr", "mse", "ssim", "lpips_alex", "label_accuracy")})


def leak_of(entry: Cell) -> float:
    return entry.worst_of("ssim") or 0.0


def identification(trials: Sequence[Trial]) -> Significance:
    chance = math.prod(trial.rank.chance for trial in trials if trial.rank)
    return Significance(victims=len(trials), chance=chance, corrected=min(1.0, 10 * chance))


def word(entry: Cell) -> Word:
    if entry.track == "production":
        return PRODUCTION[entry.defense][0]
    if entry.success_rate:
        return "reconstructed" if entry.success_rate >= 0.5 else "identified"
    return "cannot-conclude" if entry.faults else "nothing-found"


def verdicts(cells: Sequence[Cell], trials: Sequence[Trial]) -> list[Verdict]:
    """One verdict a defense and track: the gravest, and nothing-found before cannot-conclude."""
    held: dict[tuple[str, str], list[Cell]] = {}
    for entry in cells:
        if entry.role == "attack":
            held.setdefault((entry.track, entry.defense), []).append(entry)
    return [verdict(entries, trials) for entries in held.values()]


def verdict(entries: Sequence[Cell], trials: Sequence[Trial]) -> Verdict:
    entries = sorted(entries, key=lambda entry: (WORDS.index(word(entry)), -leak_of(entry)))
    lead = next((entry for entry in entries if word(entry) != "cannot-conclude"), entries[0])
    mine = [trial for trial in trials if trial.id in lead.trial_ids and trial.status == "done"]
    return Verdict(
        defense=lead.defense,
        track=lead.track,
        threat=lead.threat,
        verdict=word(lead),
        because=because(lead),
        advice="Set --trials 19." if word(lead) == "cannot-conclude" else "",
        victims=lead.valid,
        below=0.63 if word(lead) == "nothing-found" else None,
        worst_attack=lead.attack,
        trial_id=max(mine, key=lambda trial: trial.score("ssim") or 0.0).id,
        attackers=tuple(
            AttackerVerdict(
                attack=entry.attack,
                adaptive=entry.adaptive,
                threat=entry.threat,
                verdict=word(entry),
                because=because(entry),
                victims=entry.valid or 0,
                reconstructed=entry.reconstructed or 0,
            )
            for entry in entries
        ),
    )


def because(entry: Cell) -> str:
    knowing = ", who knows the defense," if entry.adaptive else ""
    return (
        f"{entry.attack}{knowing} reconstructed {entry.reconstructed} of {entry.valid} victims: SSIM "
        f"{leak_of(entry):.2f} at best (without the update 0.01)."
    )


def tradeoff_table(cells: Sequence[Cell]) -> Tradeoff:
    accuracy = {"none": 0.931, "gaussian_noise": 0.742, "outpost": 0.925, "precode": 0.902}
    cost = {"none": 0.0, "gaussian_noise": 0.01, "outpost": 0.31, "precode": 0.12}
    rows = []
    for defense, reached in accuracy.items():
        attacks = [
            entry for entry in cells if (entry.track, entry.defense, entry.role) == ("diagnostic", defense, "attack")
        ]
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
