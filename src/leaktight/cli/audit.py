"""What `leaktight audit` and `leaktight tradeoff` do, once their options are read."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from leaktight.audit.plan import Experiment
from leaktight.audit.run import check_something_ran, run_audit
from leaktight.cli.audit_display import AuditDisplay, print_audit
from leaktight.cli.console import print_json
from leaktight.cli.train import run_path
from leaktight.config.audit import AUDIT_SCENARIO, build_experiment, complete, scenario_facts
from leaktight.config.scenario import load_data
from leaktight.config.settings import Config, load_config
from leaktight.core.errors import UsageError
from leaktight.core.files import write_atomically
from leaktight.fl.run_folder import RunFolder, open_run, without_secrets
from leaktight.runtime.cluster import Ray
from leaktight.runtime.executor import Executor
from leaktight.runtime.processes import Processes

_PRELOAD = ("torchmetrics.functional.image",)  # the scores import it only when they are computed


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that both commands share."""

    config: Path | None
    overrides: Sequence[str]
    attacks: Sequence[str]
    defenses: Sequence[str]
    adaptive: bool
    trials: int | None
    out: Path | None
    resume: bool
    workers: str | None
    data_root: Path | None
    dry_run: bool
    as_json: bool


def run_command(name: str, options: Options) -> None:
    """`leaktight audit`, or `leaktight tradeoff`, which also trains every defense through all rounds."""
    weigh = name == "tradeoff"
    config = _config(options)
    dataset, partition = load_data(config)
    experiment = build_experiment(config, dataset, partition, adaptive=options.adaptive)
    executor, processes = parse_workers(options.workers)
    facts = scenario_facts(config, experiment)
    errors = Console(stderr=True)
    _announce(experiment, facts, errors)
    if options.dry_run:
        return
    path = run_path(name, config, options.out, options.resume)
    with open_run(path, config.to_toml(), resume=options.resume, key=config.key) as folder:
        experiment = experiment.keyed(folder.key)
        command = command_line(folder)
        with resumable(command, path, errors), AuditDisplay(_rounds(experiment, weigh), errors) as display:
            summary = run_audit(
                experiment,
                folder,
                executor=executor,
                scenario=facts,
                command=command,
                weigh=weigh,
                workers=processes,
                watcher=display,
            )
        report = write_run_report(folder)
    _print(summary, folder, report, as_json=options.as_json)
    check_something_ran(summary)


def parse_workers(text: str | None) -> tuple[Executor, int | None]:
    """Who runs the trials, and how many processes train: a number, "ray", or "ray://host:port"."""
    if text is None:
        return Processes(preload=_PRELOAD), None
    if text == "ray" or text.startswith("ray://"):
        return Ray(None if text == "ray" else text), None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"expected --workers to be a number of processes, ray or ray://host:port, got {text!r}")
    return Processes(int(text), _PRELOAD), int(text)


def _config(options: Options) -> Config:
    config = load_config(
        options.config,
        options.overrides,
        defenses=options.defenses,
        attacks=options.attacks,
        scenario=AUDIT_SCENARIO,
    )
    if options.data_root is not None:
        config = replace(config, data_root=options.data_root)
    return complete(config, trials=options.trials, defenses_named=bool(options.defenses))


def _rounds(experiment: Experiment, weigh: bool) -> int:
    return experiment.federation.plan.rounds if weigh else experiment.rounds[-1]


def _announce(experiment: Experiment, facts: dict[str, Any], console: Console) -> None:
    """What is about to be done, before it is done."""
    for name, fact in facts.items():
        console.print(f"{name}: {fact}", highlight=False, markup=False, soft_wrap=True)
    attacks = [f"{each.name} ({each.role})" for each in experiment.attacks if not each.adaptive]
    knowing = [f"{each.name} who knows {each.against}" for each in experiment.attacks if each.adaptive]
    console.print(
        f"{len(experiment.trials)} attacks: {', '.join(attacks)} on {', '.join(e.name for e in experiment.defenses)}"
        f"{''.join(f'; {name}' for name in knowing)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def command_line(folder: RunFolder) -> str:
    """The command line that began the run."""
    file = folder.path / "command.txt"
    if not file.exists():
        write_atomically(file, shlex.join(["leaktight", *without_secrets(sys.argv[1:])]) + "\n")
    return file.read_text().strip()


@contextmanager
def resumable(command: str, path: Path, errors: Console) -> Iterator[None]:
    """Whoever interrupts the work is told how to go on with it."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print(
            f"stopped; go on with: {resume_command(command, path)}", highlight=False, markup=False, soft_wrap=True
        )
        raise


def resume_command(command: str, path: Path) -> str:
    """The same command, to go on with the run in `path`."""
    words = [word for word in shlex.split(command) if word != "--resume"]
    out = [] if "--out" in words else ["--out", str(path)]
    return shlex.join([*words, "--resume", *out])


def write_run_report(folder: RunFolder) -> Path:
    """`report.html`, from the run's result files."""
    from leaktight.report.html import write_report

    return write_report(folder.path)


def _print(summary: dict[str, Any], folder: RunFolder, report: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    console = Console()
    print_audit(summary, console)
    console.print(f"\nreport: {report}   results: {folder.summary}", highlight=False, markup=False, soft_wrap=True)
