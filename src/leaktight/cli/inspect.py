"""What `leaktight inspect` does, once its options are read, and what a person sees of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from leaktight.audit.run import check_something_ran
from leaktight.cli.audit import command_line, parse_workers, resumable, write_run_report
from leaktight.cli.audit_display import VERDICTS, AuditDisplay
from leaktight.cli.console import print_json
from leaktight.cli.train import RUNS
from leaktight.config.inspect import Prepared, Request, prepare
from leaktight.core.errors import UsageError
from leaktight.core.types import ImageShape, Mode
from leaktight.fl.run_folder import RunFolder, latest_folder, next_folder, open_run
from leaktight.inspect.run import run_inspection

__all__ = [
    "Output",
    "Request",
    "parse_kind",
    "parse_labels",
    "parse_mode",
    "parse_numbers",
    "parse_shape",
    "run_inspect",
]

_MISSING = "-"


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the results go, and who computes them."""

    out: Path | None
    resume: bool
    workers: str | None
    dry_run: bool
    as_json: bool


def run_inspect(request: Request, output: Output) -> None:
    """`leaktight inspect`."""
    executor, _ = parse_workers(output.workers)
    prepared = prepare(request)
    errors = Console(stderr=True)
    _announce(prepared, errors)
    if output.dry_run:
        return
    path = _path(prepared.record, output)
    with open_run(path, prepared.record, resume=output.resume, clients=False) as folder:
        command = command_line(folder)
        with resumable(command, path, errors), AuditDisplay(0, errors) as display:
            summary = run_inspection(
                prepared.inspection,
                folder,
                executor=executor,
                scenario=prepared.facts,
                command=command,
                watcher=display,
            )
        report = write_run_report(folder)
    _print(summary, folder, report, as_json=output.as_json)
    check_something_ran(summary)


def parse_shape(text: str) -> ImageShape:
    """
    >>> parse_shape("3,32,32")
    ImageShape(channels=3, height=32, width=32)
    """
    numbers = _numbers(text, "--shape", int)
    if len(numbers) != 3:
        raise UsageError(f"expected --shape C,H,W, got {text!r}")
    return ImageShape(*numbers)


def parse_kind(text: str | None) -> Literal["delta", "gradient"] | None:
    match text:
        case None | "delta" | "gradient":
            return text
    raise UsageError(f"expected --kind delta or --kind gradient, got {text!r}")


def parse_mode(text: str | None) -> Mode | None:
    match text:
        case None | "train" | "eval":
            return text
    raise UsageError(f"expected --mode train or --mode eval, got {text!r}")


def parse_numbers(text: str | None, option: str) -> tuple[float, ...]:
    return () if text is None else tuple(_numbers(text, option, float))


def parse_labels(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(_numbers(text, "--labels", int))


def _numbers(text: str, option: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"expected {option} to be numbers with commas between them, got {text!r}") from None


def _path(record: str, output: Output) -> Path:
    if output.out is not None:
        return output.out
    return latest_folder(RUNS, "inspect", record) if output.resume else next_folder(RUNS, "inspect")


def _announce(prepared: Prepared, console: Console) -> None:
    """What is about to be done, before it is done."""
    for name, fact in prepared.facts.items():
        console.print(f"{name}: {fact}", highlight=False, markup=False, soft_wrap=True)
    told = ", ".join(f"{entry.name} ({entry.role})" for entry in prepared.inspection.attacks)
    console.print(f"attacks: {told}", highlight=False, markup=False, soft_wrap=True)
    for note in prepared.inspection.assumed:
        console.print(f"assumed: {note}", highlight=False, markup=False, soft_wrap=True)


def _print(summary: dict[str, Any], folder: RunFolder, report: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(summary)
        return
    console = Console()
    print_inspection(summary, console)
    console.print(
        f"\nreport: {report}   pictures: {folder.path / 'images'}   results: {folder.summary}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def print_inspection(summary: Mapping[str, Any], console: Console) -> None:
    """A row for each attack, the verdict with its evidence, and the flags."""
    console.print(attacks_table(summary))
    console.print()
    for verdict in summary["verdicts"]:
        words, style = VERDICTS[verdict["verdict"]]
        console.print(f"[bold]{verdict['defense']}[/]: [{style}]{words}[/]", highlight=False)
        console.print(f"  {verdict['because']}", highlight=False, markup=False)
    for flag in summary["flags"]:
        where = f" ({flag['cell']['attack']})" if flag["cell"] else ""
        console.print(
            f"\n{flag['code']}{where}: {flag['detail']}\n  raised if {flag['raised_if']}; {flag['advice']}",
            highlight=False,
            markup=False,
        )


def attacks_table(summary: Mapping[str, Any]) -> Table:
    """The attack's own loss and labels; scores and the best guess without the update where the truth is known."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    scores = ("PSNR dB", "SSIM", "blind SSIM") if summary["truth_given"] else ()
    for column in ("attack", "first loss", "last loss", *scores, "labels"):
        table.add_column(column, justify="left" if column in ("attack", "labels") else "right")
    for cell in summary["cells"]:
        if cell["role"] != "attack":
            continue
        figures = [_number(cell[key], "{:.3g}") for key in ("first_loss", "loss")]
        if summary["truth_given"]:
            psnr, ssim = (None if cell[name] is None else cell[name]["mean"] for name in ("psnr", "ssim"))
            blind = cell["control"]["ssim"]
            figures += [_number(psnr, "{:.1f}"), _number(ssim, "{:.3f}"), _number(blind, "{:.3f}")]
        labels = "failed" if cell["failed"] else ",".join(map(str, cell["labels"] or ()))
        table.add_row(cell["attack"], *figures, labels)
    return table


def _number(value: float | None, form: str) -> str:
    return _MISSING if value is None else form.format(value)
