"""`leaktight audit` and `leaktight tradeoff`, which have the same options."""

from __future__ import annotations

from typing import Annotated

import typer

from leaktight.cli import options
from leaktight.cli.gate import check, check_possible, chosen_gate
from leaktight.config.tables import AUDIT_SCENARIO, read_tables

AUDIT_HELP = """Attack every defense in a federated scenario; prints verdicts and a table, writes report.html.

Example: leaktight audit --defense outpost --attack csdlg --trials 10
"""
TRADEOFF_HELP = """Compare leakage, accuracy and time of defenses, and recommend one.

Example: leaktight tradeoff --defense outpost --defense noise --trials 5
"""


def command(
    context: typer.Context,
    config: options.Config = None,
    overrides: options.Set = None,
    attack: options.Attacks = None,
    defense: options.Defenses = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive/--no-adaptive", help="Also attack each defense with knowledge of it.")
    ] = True,
    trials: options.Trials = None,
    confidence: options.Confidence = None,
    budget: options.Budget = None,
    out: options.Out = None,
    resume: options.Resume = False,
    retry_failed: options.RetryFailed = False,
    workers: options.Workers = None,
    device: options.Device = None,
    data_root: options.DataRoot = None,
    dry_run: options.DryRun = False,
    fail_on: options.FailOn = None,
    as_json: options.Json = False,
) -> None:
    gate = chosen_gate(fail_on or (), dry_run=dry_run)
    named = {"attack": attack or (), "defense": defense or ()}
    asked = {"trials": trials, "confidence": confidence}
    based = resume and config is None  # on the settings of the run
    settings = [*(overrides or ()), *(() if based else options.asked(**asked)), *options.on(device)]
    if not based:
        read_tables(config, settings, named=named, scenario=AUDIT_SCENARIO)  # report errors before slow imports
    from rich.console import Console

    from leaktight.api.audit import plan
    from leaktight.api.runs import parse_workers, require_resumed
    from leaktight.cli.audit_display import announce, print_audit, run_and_print
    from leaktight.cli.forecast_display import show_forecast, warn

    parse_workers(workers)
    require_resumed(resume=resume, retry_failed=retry_failed)
    planned = plan(
        "tradeoff" if context.command.name == "tradeoff" else "audit",
        config,
        adaptive=adaptive,
        budget=options.number(budget),
        out=out,
        resume=resume,
        settings=settings,
        attacks=attack or (),
        defenses=defense or (),
        data_root=data_root,
        **(options.numbers(asked) if based else {}),
    )
    check_possible(gate, planned)
    announce(planned.experiments, planned.facts, Console(stderr=True))
    if dry_run:
        show_forecast(planned.forecast(workers), as_json=as_json)
    else:
        warn(planned.doubts(workers))
        summary = run_and_print(
            planned,
            print_audit,
            out=out,
            resume=resume,
            retry_failed=retry_failed,
            workers=workers,
            as_json=as_json,
        )
        check(gate, planned, summary)
