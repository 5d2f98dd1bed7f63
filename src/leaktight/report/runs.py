"""Reading a run's folder, finished or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from leaktight.core.errors import UsageError
from leaktight.report.results import SCHEMA_VERSION, VARIES, Cell, Score, Summary, Trial
from leaktight.report.words import leaks_when

_Record = TypeVar("_Record", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Run:
    """finished: whether `summary.json` is there; without it, the summary holds means of the trials so far."""

    path: Path
    summary: Summary
    trials: tuple[Trial, ...]
    config: str
    environment: dict[str, Any]
    command: str
    finished: bool

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def trials_of(self, cell: Cell) -> list[Trial]:
        """The trials behind a cell: those that it names, else those that match it."""
        if cell.trial_ids:
            named = set(cell.trial_ids)
            return [trial for trial in self.trials if trial.id in named]
        return [trial for trial in self.trials if _cell_of(trial) == _cell_of(cell)]


def load_run(path: Path) -> Run:
    """Read the folder of an audit or a trade-off."""
    if not path.is_dir():
        raise UsageError(f"expected the folder of a run, got {path}; name a folder such as runs/audit-001")
    trials = _read_trials(path / "trials.jsonl")
    summary = _read_summary(path / "summary.json")
    if summary is None and not trials:
        if (path / "config.toml").exists():
            raise UsageError(
                f"the run in {path} has no finished trial yet; go on with its command and --resume --out {path}"
            )
        raise UsageError(f"{path} is not a run: it has neither summary.json nor trials.jsonl; name a folder below runs")
    environment = _read_json(path / "environment.json") or {}
    return Run(
        path=path,
        summary=summary or _summary_so_far(path, trials),
        trials=tuple(trials),
        config=_read_text(path / "config.toml") or "",
        environment=environment,
        command=_command(path, summary, environment),
        finished=summary is not None,
    )


def _read_summary(path: Path) -> Summary | None:
    content = _read_json(path)
    if content is None:
        return None
    _check_version(content, path)
    if "cells" not in content and "rounds" in content:
        raise UsageError(f"{path.parent} holds a training run, which has no leakage to report; see its curve.png")
    return _validated(Summary, content, str(path))


def _read_trials(path: Path) -> list[Trial]:
    """All complete lines; a last line that a killed run left torn is passed over. A repeated id counts once."""
    lines = (_read_text(path) or "").split("\n")
    trials: dict[str, Trial] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise UsageError(f"{path}, line {number}: expected a JSON object; the file is damaged") from error
        _check_version(content, f"{path}, line {number},")
        trial = _validated(Trial, content, f"{path}, line {number}")
        trials.setdefault(trial.id, trial)
    return list(trials.values())


def _check_version(content: Any, source: object) -> None:
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{source} has schema_version {version!r}, expected {SCHEMA_VERSION}; "
            "render it with the version of Leaktight that wrote it"
        )


def _validated(kind: type[_Record], content: Any, source: str) -> _Record:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{source}: {place}: {first['msg']}; the file is damaged or not Leaktight's") from error


def _read_json(path: Path) -> Any:
    text = _read_text(path)
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}); the file is damaged") from error


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8; the file is damaged") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _command(path: Path, summary: Summary | None, environment: Any) -> str:
    written = (_read_text(path / "command.txt") or "").strip()
    words = environment.get("command") if isinstance(environment, dict) else None
    return written or (summary.command if summary else None) or " ".join(str(word) for word in words or ())


def _cell_of(record: Trial | Cell) -> tuple[object, ...]:
    return record.defense, record.attack, record.role, record.adaptive, record.threat


def _summary_so_far(path: Path, trials: Sequence[Trial]) -> Summary:
    groups: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault(_cell_of(trial), []).append(trial)
    cells = tuple(_cell_so_far(group) for group in groups.values())
    ledgers = [trial.ledger for trial in trials if trial.role == "attack" and trial.ledger]
    shared = {
        key: value if all(other.get(key) == value for other in ledgers) else VARIES
        for key, value in (ledgers[0] if ledgers else {}).items()
    }
    return Summary(schema_version=SCHEMA_VERSION, run=str(path), cells=cells, ledger=shared)


def _cell_so_far(trials: Sequence[Trial]) -> Cell:
    """Mean and worst of the trials; no interval and no success rate, which only the finished run judges."""
    first = trials[0]
    done = [trial for trial in trials if trial.status == "done"]
    scores = {}
    for metric in dict.fromkeys(name for trial in done for name in trial.scores):
        values = [value for trial in done if (value := trial.score(metric)) is not None]
        if values:
            worst = max(values) if leaks_when(metric) == "high" else min(values)
            scores[metric] = Score(mean=sum(values) / len(values), worst=worst)
    return Cell(
        attack=first.attack,
        defense=first.defense,
        role=first.role,
        adaptive=first.adaptive,
        threat=first.threat,
        trials=len(trials),
        failed=len(trials) - len(done),
        scores=scores,
        trial_ids=tuple(trial.id for trial in trials),
    )
