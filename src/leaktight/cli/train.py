"""`leaktight train`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from leaktight.cli import options
from leaktight.config.tables import read_tables


def command(
    config: options.Config = None,
    overrides: options.Set = None,
    defense: options.Stacked = None,
    centralised: Annotated[
        bool, typer.Option("--centralised", help="Train one client with all data, for reference.")
    ] = False,
    out: options.Out = None,
    engine: Annotated[
        Literal["inprocess", "flower"], typer.Option(help="Worker processes, or Flower's simulation; same results.")
    ] = "inprocess",
    resume: options.Resume = False,
    from_round: Annotated[
        int | None,
        typer.Option(
            "--from-round", min=1, help="With --resume: go back to before this round, and train it and the rest again."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes for clients (default: one per core); results do not change.")
    ] = None,
    device: options.Device = None,
    data_root: options.DataRoot = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Train a federation; prints accuracy, loss, time and bytes of every round, with a checkpoint after each.

    Example: leaktight train --set federation.rounds=50 --set partition.kind=iid
    """
    settings = [*(overrides or ()), *options.on(device)]
    if config is not None or not resume:  # a resumed run has settings of its own
        read_tables(config, settings, named={"defense": defense or ()})  # report errors before slow imports
    from rich.console import Console

    from leaktight.api.train import plan
    from leaktight.cli.console import print_json, say
    from leaktight.cli.display import TrainingDisplay, print_training
    from leaktight.cli.forecast_display import show_forecast, warn
    from leaktight.data.holdings import text_summary

    planned = plan(
        config,
        pooled=centralised,
        out=out,
        resume=resume,
        settings=settings,
        defenses=defense or (),
        data_root=data_root,
    )
    errors = Console(stderr=True)
    say(errors, text_summary(planned.dataset, planned.partition))
    if dry_run:
        show_forecast(planned.forecast(workers), as_json=as_json)
        return
    warn(planned.doubts(workers))
    path = planned.folder(out, resume=resume)
    try:
        with TrainingDisplay(planned.config.plan.rounds, planned.per_round, errors) as display:
            summary = planned.run(
                path,
                engine=engine,
                resume=resume,
                from_round=from_round,
                workers=workers,
                after_round=display.round_done,
                after_client=display.client_done,
                grows=lambda words: say(errors, f"the run grows: {'; '.join(words)}"),
            )
    except KeyboardInterrupt:
        say(errors, f"stopped; continue with the same command and --resume --out {path}")
        raise
    if as_json:
        print_json(summary.document())
    else:
        print_training(summary, path)
