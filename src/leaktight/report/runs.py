"""Reading a run's folder, finished or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from leaktight.core.errors import UsageError
from leaktight.results.folder import RunFolder
from leaktight.results.schema import (
    SCHEMA_VERSION,
    Cell,
    Environment,
    Score,
    Summary,
    Trial,
    common_ledger,
    faults_of,
    mean,
    metrics_of,
    settings_by_defense,
)
from leaktight.results.store import read_environment, read_summary, read_text, read_trials


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as read from its folder. finished: `summary.json` exists; else `summary` has means so far."""

    path: Path
    summary: Summary
    trials: tuple[Trial, ...]
    config: str
    environment: Environment
    command: str
    finished: bool

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def trials_of(self, cell: Cell) -> list[Trial]:
        """The trials behind a cell."""
        return [trial for trial in self.trials if trial.id in cell.trial_ids]


def load_run(path: Path) -> Run:
    """Read the folder of an audit, a trade-off or an inspection."""
    if not path.is_dir():
        raise UsageError(f"expected the folder of a run, got {path}; name a folder such as runs/audit-001")
    trials = tuple(read_trials(path).values())
    summary = read_summary(path)
    if summary is None and not trials:
        if (path / "config.toml").exists():
            raise UsageError(
                f"the run in {path} has no finished trial yet; continue with its command and --resume --out {path}"
            )
        raise UsageError(f"{path} is not a run: it has neither summary.json nor trials.jsonl; name a folder below runs")
    environment = read_environment(path)
    recorded = summary.command if summary else ""
    return Run(
        path=path,
        summary=_with_settings(summary, trials) if summary else _summary_so_far(path, trials),
        trials=trials,
        config=read_text(path / "config.toml"),
        environment=environment,
        command=read_text(RunFolder(path).command).strip() or recorded or " ".join(environment.command),
        finished=summary is not None,
    )


def _with_settings(summary: Summary, trials: Sequence[Trial]) -> Summary:
    """The summary; that of an older file with the settings of the defenses that its trials name."""
    return summary if summary.defenses else summary.model_copy(update={"defenses": settings_by_defense(trials)})


def _summary_so_far(path: Path, trials: Sequence[Trial]) -> Summary:
    groups: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        cell = (trial.track, trial.defense, trial.attack, trial.role, trial.adaptive, trial.threat)
        groups.setdefault(cell, []).append(trial)
    return Summary(
        schema_version=SCHEMA_VERSION,
        run=str(path),
        cells=tuple(_cell_so_far(group) for group in groups.values()),
        metrics=metrics_of(trials),
        ledger=common_ledger(trials),
        defenses=settings_by_defense(trials),
    )


def _cell_so_far(trials: Sequence[Trial]) -> Cell:
    """Mean and worst of the valid trials; intervals and the success rate come with the finished run."""
    first = trials[0]
    valid = [trial for trial in trials if trial.fault is None]
    scores = {}
    for metric in dict.fromkeys(name for trial in valid for name in trial.scores):
        values = [value for trial in valid if (value := trial.score(metric)) is not None]
        if values:
            worst = max if valid[0].leaks_when(metric) == "high" else min
            scores[metric] = Score(mean=mean(values), worst=worst(values))
    return Cell(
        attack=first.attack,
        defense=first.defense,
        role=first.role,
        adaptive=first.adaptive,
        track=first.track,
        threat=first.threat,
        trials=len(trials),
        failed=sum(trial.status == "failed" for trial in trials),
        valid=len(valid),
        faults=dict(faults_of(trials).items()),
        trial_ids=tuple(trial.id for trial in trials),
    ).with_scores(scores)
