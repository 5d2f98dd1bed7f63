"""Runs a recipe: its parts in folders named by their settings, then the table, the claims and the page.

A part that another recipe has run with the same settings is not run again; one that was interrupted goes on. So the
same command continues a recipe, and after the last part every machine that shares the folder can write the result.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import filelock

from leaktight.api import audit, train
from leaktight.api.runs import parse_workers
from leaktight.audits.judge.statistics import interval
from leaktight.audits.run import Watcher
from leaktight.config.recipes import PREFIX
from leaktight.core.errors import UsageError
from leaktight.core.files import make_private_folder, write_atomically
from leaktight.data.dataset import data_root
from leaktight.reproductions.measure import Ends, Samples, chosen, counted, ends, from_audit, from_training
from leaktight.reproductions.recipe import Claim, Part, Place, Recipe, ScaleName
from leaktight.reproductions.result import ClaimResult, Entry, Reproduction, RunUsed
from leaktight.reproductions.rules import Decided, decide
from leaktight.results.folder import RunFolder
from leaktight.results.schema import SCHEMA_VERSION, TrainingSummary, Trial, parse
from leaktight.results.store import read_file, read_trials

FOLDER = Path("runs/reproduce")
VALUES = "values.json"
TIME = "time.json"


@dataclass(frozen=True)
class Job:
    """One run of a part. seed: of a training; None for other commands."""

    recipe: Recipe
    part: Part
    settings: tuple[str, ...]
    root: Path
    seed: int | None = None
    data_root: Path | None = None

    @cached_property
    def planned(self) -> audit.PlannedAudit | train.PlannedTraining:
        source = Path(f"{PREFIX}{self.recipe.name}")
        if self.part.command == "train":
            return train.plan(source, settings=self.settings, data_root=self.data_root)
        return audit.plan(
            "audit",
            source,
            adaptive=self.part.adaptive,
            defenses_named=True,
            settings=self.settings,
            data_root=self.data_root,
        )

    @cached_property
    def digest(self) -> str:
        """Of the command and all its settings: equal ones give equal results."""
        text = repr(self.settings) if self.is_function else self.planned.config.to_toml()
        said = [self.part.command, text, *([] if self.seed is not None else [str(self.part.adaptive)])]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    @cached_property
    def trials(self) -> list[Trial]:
        """Those of an audit that is done."""
        return list(read_trials(self.path).values())

    @property
    def is_function(self) -> bool:
        return ":" in self.part.command

    @property
    def path(self) -> Path:
        return self.root / "parts" / f"{self.part.command.rpartition(':')[2]}-{self.digest}"

    @property
    def done(self) -> bool:
        return self._time[1]

    @property
    def minutes(self) -> float:
        return self._time[0]

    @property
    def _time(self) -> tuple[float, bool]:
        """The minutes that were spent on the run, and whether it is done."""
        file = self.path / TIME
        known = json.loads(file.read_text()) if file.exists() else {}
        return float(known.get("minutes", 0.0)), bool(known.get("done", False))

    def run(self, *, workers: int | str | None, watcher: Watcher, wait: bool = True) -> bool:
        """Do what is left of the run, and return whether it is done.

        wait: for another process that works on it; else it is left to that one.
        """
        if self.done:
            return True
        make_private_folder(self.path)
        try:
            with filelock.FileLock(self.path.with_suffix(".lock"), timeout=-1 if wait else 0, mode=0o600):
                if not self.done:
                    self._timed(workers, watcher)
        except filelock.Timeout:
            return False
        return True

    def _timed(self, workers: int | str | None, watcher: Watcher) -> None:
        before, began, done = self.minutes, time.perf_counter(), False
        try:
            self._go_on(workers, watcher)
            done = True
        finally:
            spent = before + (time.perf_counter() - began) / 60
            write_atomically(self.path / TIME, json.dumps({"minutes": round(spent, 3), "done": done}))

    def expected(self, workers: int | str | None) -> float | None:
        """The minutes that what is left of the run takes, by a rehearsal; None for a function, which has none."""
        if self.done:
            return 0.0
        if self.is_function:
            return None
        started = RunFolder(self.path).started
        if isinstance(self.planned, train.PlannedTraining):
            forecast = self.planned.forecast(parse_workers(workers)[1], out=self.path, resume=started)
        else:
            forecast = self.planned.forecast(workers, out=self.path, resume=started)
        return forecast.seconds[1] / 60

    def _go_on(self, workers: int | str | None, watcher: Watcher) -> None:
        if self.is_function:
            module, _, name = self.part.command.partition(":")
            values = getattr(import_module(module), name)(self.settings)
            write_atomically(self.path / VALUES, json.dumps(values, indent=1))
        elif isinstance(self.planned, train.PlannedTraining):
            self._train(self.planned, workers, watcher)
        else:
            self.planned.run(self.path, resume=RunFolder(self.path).started, workers=workers, watcher=watcher)

    def _train(self, planned: train.PlannedTraining, workers: int | str | None, watcher: Watcher) -> None:
        name = f"{self.part.name}, seed {self.seed}"
        watcher.training_begins(name, planned.config.plan.rounds)
        planned.run(
            self.path,
            resume=RunFolder(self.path).started,
            workers=parse_workers(workers)[1],
            after_round=lambda row: watcher.round_done(name, row),
        )

    @property
    def used(self) -> RunUsed:
        return RunUsed(
            part=self.part.name, command=self.part.command, digest=self.digest, seed=self.seed, minutes=self.minutes
        )


@dataclass(frozen=True)
class Reproduced:
    """A recipe at a scale, in a folder: what is to be run, and what it gave.

    root: the folder of all reproductions; runs are shared below it.
    """

    recipe: Recipe
    scale: ScaleName
    root: Path = FOLDER
    data_root: Path | None = None

    @property
    def folder(self) -> Path:
        return self.root / f"{self.recipe.name}-{self.scale}"

    @cached_property
    def jobs(self) -> list[Job]:
        chosen = self.recipe.scale(self.scale).parts
        return [job for part in self.recipe.parts if part.name in chosen or not chosen for job in self._of_part(part)]

    def _of_part(self, part: Part) -> list[Job]:
        scale = self.recipe.scale(self.scale)
        root = str(data_root(self.data_root))
        settings = tuple(each.replace("{data}", root) for each in (*part.set, *scale.set, *part.at.get(self.scale, ())))
        if part.command != "train":
            return [Job(self.recipe, part, settings, self.root, data_root=self.data_root)]
        number = min(part.seeds, scale.seeds or part.seeds)
        return [
            Job(self.recipe, part, (*settings, f"seed={seed}"), self.root, seed, self.data_root)
            for seed in range(number)
        ]

    def result(self) -> Reproduction:
        """The table and the claims, from finished runs."""
        recipe = self.recipe
        claims = [self._decided(claim) for claim in recipe.claims]
        return Reproduction(
            schema_version=SCHEMA_VERSION,
            recipe=recipe.name,
            scale=self.scale,
            paper=recipe.paper,
            where=recipe.where,
            title=recipe.title,
            kind="seeds" if all(part.command == "train" or part.seeds > 1 for part in recipe.parts) else "victims",
            differences=recipe.scale(self.scale).differences,
            notes=recipe.notes,
            legacy=recipe.legacy,
            entries=tuple(self._entry(place) for place in recipe.places()),
            claims=tuple(
                ClaimResult(
                    says=each.claim.says,
                    rule=rule_words(each.claim),
                    decision=each.decision,
                    because=each.because,
                    undecided=each.undecided,
                )
                for each in claims
            ),
            runs=tuple(job.used for job in self.jobs),
            leaktight=version("leaktight"),
            torch=version("torch"),
        )

    def _decided(self, claim: Claim) -> Decided:
        if self.scale == "smoke":
            return Decided(claim, "not testable here", "smoke shows that the recipe runs, and decides nothing")
        return decide(claim, self.samples, self.recipe.least, self._ends)

    def _ends(self, place: Place) -> Ends:
        return ends(self.recipe.choice(place))

    def _entry(self, place: Place) -> Entry:
        published = self.recipe.published.get(place.row, {}).get(place.column, "")
        values = list(self.samples(place).values())
        if not values:
            return Entry(row=place.row, column=place.column, published=published)
        found = interval(values, *self._ends(place))
        return Entry(
            row=place.row,
            column=place.column,
            published=published,
            mean=found.mean,
            low=found.low,
            high=found.high,
            number=len(values),
        )

    def samples(self, place: Place) -> Samples:
        """The values at a place of the table."""
        base = self.recipe.choice(place).get("percent_of")
        if base is None:
            return self._measured(place)
        whole = self._measured(Place(row=str(base), column=place.column))
        shared = {name: value for name, value in self._measured(place).items() if whole.get(name)}
        return {name: 100 * value / whole[name] for name, value in shared.items()}

    def _measured(self, place: Place) -> Samples:
        choice, jobs = self.recipe.choice(place), self.jobs_at(place)
        if not jobs:
            return {}
        job = jobs[0]
        if job.is_function:
            values: Mapping[str, Mapping[str, Samples]] = json.loads((job.path / VALUES).read_text())
            return values.get(place.row, {}).get(place.column, {})
        if job.part.command == "train":
            return from_training(self.summaries_at(place), choice)
        return from_audit(job.trials, choice)

    def jobs_at(self, place: Place) -> list[Job]:
        """The runs behind a place of the table; none if its part is not run at this scale."""
        part = self.recipe.choice(place)["part"]
        return [job for job in self.jobs if job.part.name == part]

    def trials_at(self, place: Place) -> list[Trial]:
        """The trials that count behind a place of the table; none if its run is no audit."""
        found: list[Trial] = []
        for job in self.jobs_at(place):
            if not job.is_function and job.part.command != "train":
                cells = chosen(job.trials, self.recipe.choice(place))
                found += [trial for cell in cells for trial in counted(cell, self.recipe.choice(place))]
        return found

    def summaries_at(self, place: Place) -> dict[str, TrainingSummary]:
        """The trainings behind a place of the table, by seed."""
        return {
            f"seed {job.seed}": parse(TrainingSummary, read_file(job.path / "summary.json") or b"", str(job.path))
            for job in self.jobs_at(place)
        }


def rule_words(claim: Claim) -> str:
    """The rule of a claim in words, as written before the run."""
    if claim.untestable:
        return "none"
    times = "" if claim.times == 1.0 else f"{claim.times:g} times "
    others = " and ".join(f"{each:g}" if isinstance(each, float) else f"that of {each}" for each in claim.right)
    if claim.relation == "near":
        return f"{claim.left} is within {claim.by:g} of {times}{others}"
    by = f" by more than {claim.by:g}" if claim.by else ""
    return f"{claim.left} is {claim.relation} {times}{others}{by}"


def parse_shard(text: str) -> tuple[int, int]:
    """
    >>> parse_shard("2/3")
    (2, 3)
    """
    place, _, number = text.partition("/")
    if not (place.isdigit() and number.isdigit() and 1 <= int(place) <= int(number)):
        raise UsageError(f"expected a shard such as 2/3, the second of three, got {text!r}")
    return int(place), int(number)
