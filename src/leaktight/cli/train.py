"""What the commands do, once their options are read. Results go to stdout, everything else to stderr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from leaktight.cli.console import print_json, print_table
from leaktight.cli.display import TrainingDisplay, defense_line, human_bytes, rounds_table, shown
from leaktight.config.scenario import build_federation, centralised, load_data
from leaktight.config.settings import Config, kind_of, load_config
from leaktight.core.errors import DataError, UsageError, suggestion
from leaktight.data import sources
from leaktight.data.holdings import plot_summary, text_summary
from leaktight.data.published import SOURCES
from leaktight.engines import inprocess
from leaktight.engines.training import Engine, train
from leaktight.report.curves import plot_learning_curve
from leaktight.report.words import percent
from leaktight.results.folder import RunFolder, latest_folder, next_folder, open_run
from leaktight.results.schema import UNDEFENDED, TrainingSummary

RUNS = Path("runs")


def run_training(
    config_path: Path | None,
    overrides: list[str],
    *,
    defenses: Sequence[str],
    pooled: bool,
    out: Path | None,
    resume: bool,
    workers: int | None,
    data_root: Path | None,
    dry_run: bool,
    as_json: bool,
    engine: str = "inprocess",
) -> None:
    """`leaktight train`."""
    if engine not in _ENGINES:
        raise UsageError(f"no engine {engine!r}; {suggestion(engine, _ENGINES)}")
    config = _config(config_path, overrides, defenses, data_root)
    if pooled:
        config = centralised(config)
    errors = Console(stderr=True)
    dataset, partition = load_data(config)
    federation = build_federation(config, dataset, partition)
    errors.print(text_summary(dataset, partition), highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        return
    path = run_path("train", config, out, resume)
    per_round = config.plan.per_round or len(federation.shares)
    with open_run(path, config.to_toml(), resume=resume, key=config.key) as folder:
        federation = federation.keyed(folder.key)
        plot_summary(dataset, partition, folder.path / "holdings.png")
        try:
            with TrainingDisplay(config.plan.rounds, per_round, errors) as display:
                summary = train(
                    federation,
                    folder,
                    engine=_ENGINES[engine](folder),
                    defense_kind=kind_of(config.defense) or "",
                    workers=workers,
                    after_round=display.round_done,
                    after_client=display.client_done,
                )
        except KeyboardInterrupt:
            errors.print(f"stopped; go on with the same command and --resume --out {folder.path}", highlight=False)
            raise
        plot_learning_curve(summary, folder.path / "curve.png")
    _print_training(summary, folder, as_json=as_json)


def _in_process(folder: RunFolder) -> Engine:
    if _flower_folder(folder).exists():
        raise UsageError(f"the run in {folder.path} was begun on Flower; resume it with --engine flower")
    return inprocess.run


def _on_flower(folder: RunFolder) -> Engine:
    from leaktight.engines.flower.simulation import simulate  # an extra, and slow to import

    return partial(simulate, folder=_flower_folder(folder))


def _flower_folder(folder: RunFolder) -> Path:
    """Where a run on Flower keeps its name and its clients' private states."""
    return folder.path / "flower"


_ENGINES: dict[str, Callable[[RunFolder], Engine]] = {"inprocess": _in_process, "flower": _on_flower}


def print_sources(data_root: Path | None, *, as_json: bool) -> None:
    """`leaktight data` without a name: what there is to fetch, and what is here."""
    root = sources.data_root(data_root)
    states = {name: "present" if sources.present(name, root) else "missing" for name in SOURCES}
    if as_json:
        rows = [
            {"name": name, "state": state, "folder": str(root / SOURCES[name].folder)} for name, state in states.items()
        ]
        print_json({"schema_version": 1, "root": str(root), "sources": rows})
        return
    Console().print(f"data root: {root}", highlight=False, soft_wrap=True)
    rows_of_text = [(name, state, SOURCES[name].description) for name, state in states.items()]
    print_table(("name", "state", "description"), rows_of_text)


def run_fetch(name: str, data_root: Path | None, *, verify_only: bool, force: bool, as_json: bool) -> None:
    """`leaktight data NAME`."""
    root = sources.data_root(data_root)
    if verify_only:
        report = sources.verify(name, root)
    else:
        with _download_progress() as progress:
            report = sources.prepare(name, root, force=force, progress=_tell(progress))
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "name": name,
                "state": report.state,
                "folder": str(report.folder),
                "message": report.message,
            }
        )
    elif report.usable:
        Console().print(report.message, highlight=False, markup=False, soft_wrap=True)
    if not report.usable:
        raise DataError(report.message)


def _config(path: Path | None, overrides: list[str], defenses: Sequence[str], data_root: Path | None) -> Config:
    config = load_config(path, overrides, defenses=defenses)
    return config if data_root is None else replace(config, data_root=data_root)


def run_path(command: str, config: Config, out: Path | None, resume: bool) -> Path:
    """Where a run's results go: where the user says, else the newest run to resume, else a new folder."""
    if out is not None:
        return out
    return latest_folder(RUNS, command, config.to_toml()) if resume else next_folder(RUNS, command)


def _print_training(summary: TrainingSummary, folder: RunFolder, *, as_json: bool) -> None:
    if as_json:
        print_json(summary.document())
        return
    console = Console()
    console.print(rounds_table(summary.rounds[-5:]))
    uploaded = sum(row.bytes_up for row in summary.rounds)
    console.print(
        f"final accuracy {percent(summary.final.accuracy, 2)}, loss {shown(summary.final.loss, '{:.4f}')}, "
        f"{summary.seconds:.1f} s, {human_bytes(uploaded)} sent by clients",
        highlight=False,
        soft_wrap=True,
    )
    if summary.defense.kind != UNDEFENDED:
        console.print(defense_line(summary.defense), highlight=False, soft_wrap=True)
    console.print(f"results: {folder.summary}   curve: {folder.path / 'curve.png'}", highlight=False, soft_wrap=True)


def _download_progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _tell(progress: Progress) -> sources.FileProgress:
    tasks: dict[str, Any] = {}

    def tell(name: str, done: int, total: int | None) -> None:
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=total)
        progress.update(tasks[name], completed=done, total=total)

    return tell
