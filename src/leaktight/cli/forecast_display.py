"""The output of a dry run: the forecast of a plan; and the warning before a run that may not end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leaktight.api.forecast import sentence
from leaktight.audits.advice import GIGABYTE, duration
from leaktight.cli.console import print_json, say
from leaktight.core.errors import LeaktightError
from leaktight.core.text import shown
from leaktight.report.words import counted
from leaktight.results.forecast import AttackWork, Forecast, Problem, TrainingWork

_ALIKE = {"whole": "measured", "part": "a part measured", "alike": "as without knowledge", "not": "cannot run"}


def show_forecast(forecast: Forecast, *, as_json: bool) -> None:
    """Print the forecast, or its document. Raises an error if no attack of the plan can run."""
    if as_json:
        print_json(forecast.document())
    else:
        print_forecast(forecast, Console())
    attacks = [each for each in forecast.attacks if each.role == "attack"]
    if attacks and all(each.error for each in attacks):
        raise LeaktightError(f"no attack of this plan can run; {attacks[0].attack}: {attacks[0].error}")


def warn(problems: Sequence[Problem]) -> None:
    """Print the problems of a plan before it runs."""
    for each in problems:
        say(Console(stderr=True), f"warning: {sentence(each)}")


def print_forecast(forecast: Forecast, console: Console) -> None:
    """Print counts, the costs of each attack and training, the estimates, and the problems with what to change."""
    if forecast.attacks:
        console.print(_attacks(forecast.attacks))
        console.print()
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for name, words in _lines(forecast):
        grid.add_row(name, Text(shown(words)))
    console.print(grid)


def _lines(forecast: Forecast) -> Iterator[tuple[str, str]]:
    if forecast.attacks:
        yield "trials", _range(*forecast.trials)
        used = f", {forecast.example_uses} with repetitions" if forecast.example_uses > forecast.examples else ""
        steps = counted(forecast.local_steps, "local step")
        yield "update", f"{counted(forecast.examples, 'example')} in {steps}{used} behind the largest"
    for work in forecast.trainings:
        yield "training", _training(work)
    low, high = (duration(each) for each in forecast.seconds)
    where = counted(forecast.processes, "process") if forecast.processes == 1 else f"{forecast.processes} processes"
    yield "time", f"about {low if low == high else f'{low} to {high}'} in {where} (an estimate)"
    memory = [f"{size / GIGABYTE:.1f} GB" for size in (forecast.memory.process, forecast.memory.total)]
    together = "" if forecast.processes == 1 else f" for each process, {memory[1]} in total"
    yield "memory", f"about {memory[0]}{together} (an estimate)"
    yield "basis", forecast.basis
    for problem in forecast.problems:
        yield "problem", problem.what
        for change in problem.changes:
            yield "  change", f"{change.setting} = {change.value}: about {duration(change.seconds)} with this"


def _training(work: TrainingWork) -> str:
    track = " in production" if work.track == "production" else ""
    each = f"{counted(work.steps, 'step')} on {counted(work.examples, 'example')} each"
    total = duration(work.rounds * work.clients * work.seconds)
    return (
        f"{work.defense}{track}: {counted(work.rounds, 'round')} of {counted(work.clients, 'client')}, {each}; {total}"
    )


def _attacks(works: Sequence[AttackWork]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("attack", "trials", "one trial", "estimate"):
        table.add_column(column, justify="left" if column in ("attack", "estimate") else "right")
    for work in works:
        name = f"{work.attack} knowing {work.against}" if work.against else work.attack
        track = " (production)" if work.track == "production" else ""
        time = "-" if work.error else f"{work.seconds:.2g} s" if work.seconds < 60 else duration(work.seconds)
        table.add_row(shown(f"{name}{track}"), _range(*work.trials), time, _ALIKE[work.measured])
    return table


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
