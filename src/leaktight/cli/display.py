"""The output of training and downloads: progress on stderr (plain lines if it is no terminal), and a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from leaktight.cli.console import say
from leaktight.report.words import defense_words, percent
from leaktight.results.schema import UNDEFENDED, DefenseCost, Round, TrainingSummary

COLUMNS = ("round", "accuracy", "loss", "train loss", "seconds", "defense", "up", "down", "clients")
MISSING = "-"
_SHOWN_ROWS = 12


def shown(value: float | None, form: str) -> str:
    """A number in the format `form`, or "-" for None."""
    return MISSING if value is None else form.format(value)


def human_bytes(number: float) -> str:
    """
    >>> human_bytes(1536)
    '1.5 kB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1024 or unit == "GB":
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


def cells(row: Round) -> tuple[str, ...]:
    """The cells of a round, in the order of `COLUMNS`; "defense" is its share of the clients' time."""
    failed = f" ({len(row.failures)} failed)" if row.failures else ""
    return (
        str(row.round),
        percent(row.accuracy),
        shown(row.loss, "{:.4f}"),
        shown(row.train_loss, "{:.4f}"),
        f"{row.seconds:.2f}",
        percent(row.client["defense_seconds"] / row.client["seconds"]) if row.client else MISSING,
        human_bytes(row.bytes_up),
        human_bytes(row.bytes_down),
        f"{row.clients}{failed}",
    )


def rounds_table(rows: Sequence[Round]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    return table


def defense_line(cost: DefenseCost) -> str:
    """The cost and the figures of a defense on one line.

    >>> cost = {"kind": "lrp", "settings": {"spread": 1.0}, "share_of_time": 0.021, "seconds_per_step": 3e-5}
    >>> defense_line(DefenseCost.model_validate({**cost, "rate": 0.1}))
    'defense lrp (spread 1): 2.1 % of local training time, 0.03 ms a step; rate 0.1'
    """
    parts = [f"{name} {value:.4g}{' a round' * name.endswith('_seconds')}" for name, value in cost.figures.items()]
    if cost.share_of_time is not None and cost.seconds_per_step is not None:
        step = f"{1000 * cost.seconds_per_step:.2f} ms a step"
        parts.insert(0, f"{percent(cost.share_of_time)} of local training time, {step}")
    return f"defense {defense_words(cost.kind, cost.settings)}: {'; '.join(parts)}"


def progress_bars(console: Console, *, transient: bool = False, disable: bool = False) -> Progress:
    """Progress bars with counts, elapsed time and remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        disable=disable,
    )


class TrainingDisplay:
    """A live table of the rounds. The engine calls `client_done` and `round_done`."""

    def __init__(self, rounds: int, clients_per_round: int, console: Console) -> None:
        self.console = console
        self.rows: list[Round] = []
        self.clients_per_round = clients_per_round
        self.progress = progress_bars(console)
        self.all_rounds = self.progress.add_task("rounds", total=rounds)
        self.this_round = self.progress.add_task("clients", total=clients_per_round)
        self.live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def _render(self) -> Group:
        return Group(rounds_table(self.rows[-_SHOWN_ROWS:]), self.progress)

    def __enter__(self) -> TrainingDisplay:
        if self.console.is_terminal:
            self.live.start()
        else:
            self.console.print("\t".join(COLUMNS), highlight=False, soft_wrap=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def client_done(self) -> None:
        self.progress.advance(self.this_round)

    def round_done(self, row: Round) -> None:
        self.rows.append(row)
        self.progress.update(self.all_rounds, completed=row.round)
        self.progress.reset(self.this_round, total=self.clients_per_round)
        if not self.console.is_terminal:
            self.console.print("\t".join(cells(row)), highlight=False, soft_wrap=True)


def print_training(summary: TrainingSummary, path: Path) -> None:
    """Print the last rounds, the final scores and the paths of the files."""
    console = Console()
    console.print(rounds_table(summary.rounds[-5:]))
    uploaded = sum(row.bytes_up for row in summary.rounds)
    say(
        console,
        f"final accuracy {percent(summary.final.accuracy)}, loss {shown(summary.final.loss, '{:.4f}')}, "
        f"{summary.seconds:.1f} s, {human_bytes(uploaded)} sent by clients",
    )
    if summary.defense.kind != UNDEFENDED:
        say(console, defense_line(summary.defense))
    say(console, f"results: {path / 'summary.json'}   curve: {path / 'curve.png'}")


class DownloadDisplay(Progress):
    """A progress bar for each downloaded file."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.files: dict[str, TaskID] = {}

    def file_progress(self, name: str, done: int, total: int | None) -> None:
        if name not in self.files:
            self.files[name] = self.add_task(name, total=total)
        self.update(self.files[name], completed=done, total=total)
