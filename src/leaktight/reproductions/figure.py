"""The small figure of a result: pictures of one victim, curves over rounds, lines over a number, or points."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from leaktight.reproductions.recipe import Choice, Place
from leaktight.reproductions.run import Reproduced
from leaktight.results.schema import TrainingSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 7.0
_ACROSS = 4
"""The most columns beside each other."""
_TITLE = 24
"""The most letters in a line of a title."""

Pair: TypeAlias = tuple[Path, Path]
"""The pictures of a truth and of a guess."""


def draw(made: Reproduced) -> bytes | None:
    """The figure as PNG; None for a recipe without one."""
    drawer = _DRAWERS.get(made.recipe.figure)
    if drawer is None:
        return None
    figure = drawer(made)
    target = BytesIO()
    figure.savefig(target, format="png", dpi=110, metadata={"Software": None})
    return target.getvalue()


def _pictures(made: Reproduced) -> Figure:
    """The first victim and the guesses for it: a picture for each row of the table, a line for each attack.

    Where rows have different victims, each has its own beside the guess.
    """
    lines: dict[tuple[Pair | None, ...], str] = {}
    for column in made.recipe.columns:
        lines.setdefault(tuple(_guess(made, row, column) for row in made.recipe.rows), column)
    shown = {pairs: column for pairs, column in lines.items() if any(pairs)}
    figure, axes = _grid(len(shown), len(made.recipe.rows) + 1, 1.15)
    for line, (pairs, column) in zip(axes, shown.items(), strict=True):
        truths = {pair[0].read_bytes(): pair[0] for pair in pairs if pair is not None}
        _show(line[0], "truth", list(truths.values()) if len(truths) == 1 else [])
        for place, row, pair in zip(line[1:], made.recipe.rows, pairs, strict=True):
            _show(place, row, [] if pair is None else pair[1:] if len(truths) == 1 else pair)
        line[0].set_ylabel(column, fontsize=6)
    figure.tight_layout()
    return figure


def _guess(made: Reproduced, row: str, column: str) -> Pair | None:
    """The pictures of the truth and of the guess in the first trial behind a place of the table."""
    place = Place(row=row, column=column)
    for trial in made.trials_at(place):
        if trial.images is not None and trial.images.truth is not None:
            folder = made.jobs_at(place)[0].path
            return folder / trial.images.truth, folder / trial.images.guess
    return None


def _show(place: Axes, title: str, pictures: Sequence[Path]) -> None:
    """Pictures of one size side by side; an empty place without any."""
    import matplotlib.image as images  # slow to import

    place.set_xticks([])
    place.set_yticks([])
    if not pictures:
        place.set_frame_on(False)
        return
    place.set_title(textwrap.fill(title, _TITLE), fontsize=6)
    joined = np.concatenate([np.atleast_3d(images.imread(str(picture))) for picture in pictures], axis=1)
    place.imshow(joined.squeeze(), cmap="gray", vmin=0, vmax=1)


def _curves(made: Reproduced) -> Figure:
    """The accuracy over the rounds, by row: the mean over seeds, and their range. Each column by itself."""
    columns = made.recipe.columns
    trained = [name for name in columns if _is_trained(made, name)]
    shown = [name for name in trained if _is_accuracy(columns[name])] or trained[:1] or list(columns)[:1]
    figure, axes = _grid(1, len(shown), 3.0)
    for place, column in zip(axes[0], shown, strict=True):
        for row in made.recipe.rows:
            at = Place(row=row, column=column)
            if any(job.part.command == "train" for job in made.jobs_at(at)):
                _curve(place, row, made.summaries_at(at).values())
        place.set_title(textwrap.fill(column, _TITLE), fontsize=7)
        place.set_xlabel("round")
        place.set_ylabel("accuracy, %")
        place.legend(fontsize=7)
    figure.tight_layout()
    return figure


def _is_trained(made: Reproduced, column: str) -> bool:
    """Whether a place of the column has a training behind it at this scale."""
    jobs = [job for row in made.recipe.rows for job in made.jobs_at(Place(row=row, column=column))]
    return any(job.part.command == "train" for job in jobs)


def _is_accuracy(choice: Choice) -> bool:
    return choice.get("metric", "accuracy") == "accuracy" and "percent_of" not in choice


def _curve(place: Axes, row: str, summaries: Iterable[TrainingSummary]) -> None:
    histories = [
        [(each.round, 100 * each.accuracy) for each in summary.rounds if each.accuracy is not None]
        for summary in summaries
    ]
    rounds = [number for number, _ in histories[0]]
    values = np.array([[value for _, value in history] for history in histories])
    place.plot(rounds, values.mean(0), label=row, linewidth=1.2)
    place.fill_between(rounds, values.min(0), values.max(0), alpha=0.2)


def _points(made: Reproduced) -> Figure:
    """Each column by itself, some beside each other: the mean of each row with its interval; no empty ones."""
    entries = {(entry.row, entry.column): entry for entry in made.result().entries}
    filled = [place for place, entry in entries.items() if entry.mean is not None]
    rows = [row for row in made.recipe.rows if any(row == each for each, _ in filled)]
    columns = [column for column in made.recipe.columns if any(column == each for _, each in filled)]
    across = min(len(columns), _ACROSS)
    figure, axes = _grid(-(-len(columns) // across), across, 0.3 * len(rows) + 1.0)
    for number, place in enumerate(place for line in axes for place in line):
        if number >= len(columns):
            place.axis("off")
            continue
        for height, row in enumerate(rows):
            entry = entries[row, columns[number]]
            if entry.mean is not None and entry.low is not None and entry.high is not None:
                place.plot([entry.low, entry.high], [height, height], color="0.6")
                place.plot(entry.mean, height, "o", color="C0", markersize=4)
        place.set_yticks(range(len(rows)), [""] * len(rows) if number % across else rows, fontsize=7)
        place.set_title(textwrap.fill(columns[number], _TITLE), fontsize=7)
        place.tick_params(axis="x", labelsize=6)
        place.invert_yaxis()
    figure.tight_layout()
    return figure


def _lines(made: Reproduced) -> Figure:
    """A line for each row, over the columns whose names are numbers: the mean, and its interval."""
    numbers = {column: number for column in made.recipe.columns if (number := _number(column)) is not None}
    entries = {(entry.row, entry.column): entry for entry in made.result().entries}
    figure, ((place,),) = _grid(1, 1, 3.0)
    for row in made.recipe.rows:
        known = [(number, entries[row, column]) for column, number in numbers.items()]
        points = [
            (at, each.low, each.mean, each.high)
            for at, each in known
            if each.low is not None and each.mean is not None and each.high is not None
        ]
        if points:
            across, low, middle, high = zip(*points, strict=True)
            place.plot(across, middle, "o-", label=row, linewidth=1.2, markersize=3)
            place.fill_between(across, low, high, alpha=0.2)
    if min(numbers.values()) > 0 and max(numbers.values()) > 10 * min(numbers.values()):
        place.set_xscale("log")
        place.set_xticks(list(numbers.values()), list(numbers))
    place.legend(fontsize=7)
    figure.tight_layout()
    return figure


def _number(text: str) -> float | None:
    """
    >>> _number("0.5"), _number("PSNR")
    (0.5, None)
    """
    try:
        return float(text)
    except ValueError:
        return None


def _grid(lines: int, columns: int, height: float) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(_WIDTH, max(1.3, height * lines)))
    places = figure.subplots(lines, columns, squeeze=False)
    return figure, [list(line) for line in places]


_DRAWERS: Mapping[str, Callable[[Reproduced], Figure]] = {
    "pictures": _pictures,
    "curves": _curves,
    "points": _points,
    "lines": _lines,
}
