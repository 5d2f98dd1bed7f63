"""The command line. Exit codes: 0 done, 1 the work failed, 2 bad usage or config, 130 interrupted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from leaktight import __version__
from leaktight.core.errors import LeaktightError, UsageError

app = typer.Typer(
    name="leaktight",
    help="Measure what a federated-learning update gives away about its training data, and what each defense costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigArgument = Annotated[
    Path | None, typer.Argument(help="A TOML config. Without one, a built-in scenario on embedded data runs offline.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override a setting; may be repeated.")
]
DataRootOption = Annotated[
    Path | None,
    typer.Option("--data-root", help="Folder of downloaded data sets (default: $LEAKTIGHT_DATA, else a user cache)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output, nothing else.")]


def main() -> None:
    """Run the command line; every known error is one line on stderr."""
    sys.path.insert(0, os.getcwd())  # a user's own module:function is found in the current folder
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        print("leaktight: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
    except LeaktightError as error:
        print(f"leaktight: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2 if isinstance(error, UsageError) else 1)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit()


@app.command()
def train(
    config: ConfigArgument = None,
    overrides: SetOption = None,
    defense: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="A defense of the catalogue; several are stacked in the order given."),
    ] = None,
    centralised: Annotated[
        bool, typer.Option("--centralised", help="Train on the pooled data: the reference without federation.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/train-NNN).")] = None,
    engine: Annotated[
        str, typer.Option(metavar="inprocess|flower", help="Worker processes, or Flower's simulation; same numbers.")
    ] = "inprocess",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with --out, or with the newest run of the same settings.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes for clients (default: one per core); no effect on numbers.")
    ] = None,
    data_root: DataRootOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the config, show who holds what, and stop.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Federated training: accuracy, loss, time and bytes of every round, a checkpoint after each.

    Example: leaktight train --set federation.rounds=50 --set partition.kind=iid
    """
    from leaktight.cli.train import run_training

    run_training(
        config,
        overrides or [],
        defenses=defense or [],
        pooled=centralised,
        engine=engine,
        out=out,
        resume=resume,
        workers=workers,
        data_root=data_root,
        dry_run=dry_run,
        as_json=as_json,
    )


AttackOption = Annotated[
    list[str] | None, typer.Option("--attack", metavar="KIND", help="An attack of the catalogue; may be repeated.")
]
DefenseOption = Annotated[
    list[str] | None,
    typer.Option("--defense", metavar="KIND", help="A defense of the catalogue; each is tried by itself."),
]
AdaptiveOption = Annotated[
    bool, typer.Option("--adaptive/--no-adaptive", help="Also attack each defense with those who know it.")
]
TrialsOption = Annotated[int | None, typer.Option("--trials", min=1, help="Victims for each attack on each defense.")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with --out, or with the newest run of the same settings.")
]
WorkersOption = Annotated[
    str | None,
    typer.Option(
        "--workers", metavar="N|ray[://HOST:PORT]", help="Processes (default: one per core); no effect on numbers."
    ),
]


@app.command()
def audit(
    config: ConfigArgument = None,
    overrides: SetOption = None,
    attack: AttackOption = None,
    defense: DefenseOption = None,
    adaptive: AdaptiveOption = True,
    trials: TrialsOption = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/audit-NNN).")] = None,
    resume: ResumeOption = False,
    workers: WorkersOption = None,
    data_root: DataRootOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the config, say what would run, and stop.")] = False,
    as_json: JsonOption = False,
) -> None:
    """The main job: attack every defense in a federated scenario; verdicts, a table, report.html.

    Example: leaktight audit --defense outpost --attack csdlg --trials 10
    """
    from leaktight.cli.audit import Options, run_command

    options = Options(
        config=config,
        overrides=overrides or [],
        attacks=attack or [],
        defenses=defense or [],
        adaptive=adaptive,
        trials=trials,
        out=out,
        resume=resume,
        workers=workers,
        data_root=data_root,
        dry_run=dry_run,
        as_json=as_json,
    )
    run_command("audit", options)


@app.command()
def tradeoff(
    config: ConfigArgument = None,
    overrides: SetOption = None,
    attack: AttackOption = None,
    defense: DefenseOption = None,
    adaptive: AdaptiveOption = True,
    trials: TrialsOption = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/tradeoff-NNN).")] = None,
    resume: ResumeOption = False,
    workers: WorkersOption = None,
    data_root: DataRootOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the config, say what would run, and stop.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Leakage, accuracy and time of every defense, those that no other beats, and a recommendation.

    Example: leaktight tradeoff --defense outpost --defense noise --set federation.rounds=20
    """
    from leaktight.cli.audit import Options, run_command

    options = Options(
        config=config,
        overrides=overrides or [],
        attacks=attack or [],
        defenses=defense or [],
        adaptive=adaptive,
        trials=trials,
        out=out,
        resume=resume,
        workers=workers,
        data_root=data_root,
        dry_run=dry_run,
        as_json=as_json,
    )
    run_command("tradeoff", options)


@app.command()
def inspect(
    model: Annotated[
        str, typer.Option(metavar="NAME|MODULE:FUNCTION", help="The network, as `leaktight train` has it.")
    ],
    before: Annotated[Path, typer.Option(help="The model that the client got: .pt, .pth, .safetensors or .npz.")],
    shape: Annotated[str, typer.Option(metavar="C,H,W", help="The size of one image.")],
    after: Annotated[Path | None, typer.Option(help="The model that the client sent back.")] = None,
    update: Annotated[Path | None, typer.Option(help="What the client sent instead: see --kind.")] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="delta|gradient", help="What --update is: after minus before, or a gradient.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes (default: rows of the last layer).")] = None,
    mean: Annotated[
        str | None, typer.Option(metavar="M[,M,M]", help="Normalisation of images in [0, 1] before the network.")
    ] = None,
    std: Annotated[str | None, typer.Option(metavar="S[,S,S]", help="The same: (x - mean) / std.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples behind the update (default: 1).")] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="L[,L...]", help="Their labels, if the attacker knows them.")
    ] = None,
    local: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Local training: learning_rate, epochs or steps, batch_size, momentum ..."
        ),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(metavar="train|eval", help="How batch normalisation and dropout ran (default: train).")
    ] = None,
    attack: AttackOption = None,
    truth: Annotated[
        Path | None, typer.Option(help="The true images, to score against: a picture, a folder of pictures, an .npz.")
    ] = None,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/inspect-NNN).")] = None,
    resume: ResumeOption = False,
    workers: WorkersOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the files, say what would run, and stop.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Attack an update that you captured: what can be reconstructed from it, and what its numbers show.

    Example: leaktight inspect --model net:build --before before.pt --after after.pt --shape 1,28,28
    """
    from leaktight.cli import inspect as command

    request = command.Request(
        model=model,
        before=before,
        after=after,
        update=update,
        kind=command.parse_kind(kind),
        inputs=command.parse_shape(shape),
        classes=classes,
        mean=command.parse_numbers(mean, "--mean"),
        std=command.parse_numbers(std, "--std"),
        batch_size=batch_size,
        labels=command.parse_labels(labels),
        local=local or [],
        mode=command.parse_mode(mode),
        attacks=attack or [],
        truth=truth,
        overrides=overrides or [],
    )
    output = command.Output(out=out, resume=resume, workers=workers, dry_run=dry_run, as_json=as_json)
    command.run_inspect(request, output)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are compared.")],
    form: Annotated[str, typer.Option("--format", help="html, or tables: md, csv, latex.")] = "html",
    out: Annotated[
        Path | None,
        typer.Option(help="The file (default: RUN/report.html, comparison.html for several; tables are printed)."),
    ] = None,
) -> None:
    """Make a run's page again, compare runs side by side, or print their tables.

    Example: leaktight report runs/audit-001 runs/audit-002 --format md
    """
    from leaktight.cli.report import run_report

    run_report(runs, form=form, out=out)


@app.command(name="list")
def list_entries(
    kind: Annotated[str, typer.Argument(help="datasets, partitions, models, aggregators, defenses, metrics ...")],
    as_json: JsonOption = False,
) -> None:
    """The names that a config and the options accept, with a line about each."""
    from leaktight.cli.listing import print_entries

    print_entries(kind, as_json=as_json)


@app.command()
def data(
    name: Annotated[str | None, typer.Argument(help="A data set or weights; without one, all are listed.")] = None,
    data_root: DataRootOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the files that are there; fetch nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there but damaged.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch a data set with checksum and resume, or say exactly what to put where.

    Example: leaktight data mnist
    """
    from leaktight.cli.train import print_sources, run_fetch

    if name is None:
        print_sources(data_root, as_json=as_json)
    else:
        run_fetch(name, data_root, verify_only=verify, force=force, as_json=as_json)


generator_app = typer.Typer(no_args_is_help=True, help="Generators of images, for the attacks ggl and gias.")
app.add_typer(generator_app, name="generator")


@generator_app.command(name="train")
def train_generator(
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="Where the weights go; samples beside, .png.")],
    config: ConfigArgument = None,
    overrides: SetOption = None,
    data: Annotated[
        str | None, typer.Option(metavar="KIND", help="One of `leaktight list datasets` (default: the config's).")
    ] = None,
    size: Annotated[int | None, typer.Option(min=8, help="Pixels a side, where the data set can be scaled.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(metavar="dcgan|wgan_gp", help="The game; the second is slower and seldom collapses."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the images (default: 3000 steps).")] = None,
    batch_size: Annotated[int | None, typer.Option(min=2, help="Images of a step (default: 32).")] = None,
    latent: Annotated[int | None, typer.Option(min=1, help="The length of a latent (default: 64).")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Channels of the last hidden layer (default: 32).")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    data_root: DataRootOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files that are there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a small generator on public images, so that ggl and gias can search among such images.

    It sees the TEST part of the data set and nothing else: clients, and so all victims, hold the training part.

    A test image that clients hold too is left out. The file notes the data settings and a digest of the images.

    Give it the audit's config, or the same data settings, so that the parts are cut alike.

    For more public images, in sets that their makers did not cut: --set data.test_share=0.5, here and in the audit.

    Example: leaktight generator train --data digits --out digits.safetensors
    """
    from leaktight.cli.generator import Request, run_training

    training = {"kind": kind, "epochs": epochs, "batch_size": batch_size, "latent": latent, "width": width}
    run_training(
        Request(
            config=config,
            overrides=overrides or [],
            data=data,
            size=size,
            out=out,
            training=training,
            seed=seed,
            root=data_root,
            force=force,
            as_json=as_json,
        )
    )


flower_app = typer.Typer(no_args_is_help=True, help="Leaktight in a Flower federation.")
app.add_typer(flower_app, name="flower")


@flower_app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the Flower project.")],
    config: ConfigArgument = None,
    overrides: SetOption = None,
    defense: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="A defense of the catalogue; several are stacked in the order given."),
    ] = None,
) -> None:
    """Write the scenario as a Flower project, for `flwr run` on a simulation or on a SuperLink with SuperNodes.

    Example: leaktight flower export my-app my.toml --defense outpost
    """
    from leaktight.cli.flower import run_export

    run_export(folder, config, overrides or [], defenses=defense or [])
