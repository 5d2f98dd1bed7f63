"""Accuracy while training goes on: several runs in a panel, several panels in a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from leaktight.core.files import replace_atomically

_COLOURS = ("#0b5fa5", "#b3541e", "#2e7d32", "#7b3fa0", "#8a6d00", "#444444")
_MARKS = ("o", "s", "^", "D", "v", "x")


@dataclass(frozen=True)
class AccuracyCurve:
    """One run: how far it was when scored, and how much was right then, from 0 to 1."""

    label: str
    places: Sequence[float]
    accuracies: Sequence[float]


def plot_accuracy_curves(
    rows: Mapping[str, Mapping[str, Sequence[AccuracyCurve]]], picture: Path, *, across: str
) -> None:
    """Panels by row (a method, say) and column (a test set), to a PNG; a run looks the same in all of them.

    across: what `places` count, written below the last row.
    """
    labels = list(dict.fromkeys(curve.label for row in rows.values() for panel in row.values() for curve in panel))
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    figure = Figure(figsize=(3.6 * len(columns), 2.9 * len(rows) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey="col")
    for line, (method, row) in zip(axes, rows.items(), strict=True):
        for axis, column in zip(line, columns, strict=True):
            for curve in row.get(column, ()):
                series = labels.index(curve.label)
                axis.plot(
                    curve.places,
                    [100 * accuracy for accuracy in curve.accuracies],
                    color=_COLOURS[series % len(_COLOURS)],
                    marker=_MARKS[series % len(_MARKS)],
                    linestyle=("-", "--")[series % 2],
                    markersize=3.5,
                    linewidth=1.3,
                    label=curve.label,
                )
            axis.grid(alpha=0.25)
            axis.set_title(f"{method}: {column}", loc="left", fontsize=9)
        line[0].set_ylabel("accuracy (%)")
    for axis in axes[-1]:
        axis.set_xlabel(across)
        axis.set_ylim(bottom=0)  # after all rows: it ends the scaling of the column
    axes[0][0].legend(fontsize=8, frameon=False)
    replace_atomically(picture, lambda temporary: figure.savefig(temporary, dpi=150))
