"""Figures as PNG files: learning curves, curves of several runs, decision boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from leaktight.core.files import replace_atomically
from leaktight.report.words import percent
from leaktight.results.schema import TrainingSummary

_COLOURS = ("#0b5fa5", "#b3541e", "#2e7d32", "#7b3fa0", "#8a6d00", "#444444")
_MARKS = ("o", "s", "^", "D", "v", "x")


@dataclass(frozen=True)
class AccuracyCurve:
    """The accuracies of one run, from 0 to 1, and where on the horizontal axis they were measured."""

    label: str
    places: Sequence[float]
    accuracies: Sequence[float]


@dataclass(frozen=True)
class Boundary:
    """A classifier on a square grid: the probability of class 1, (G, G), the first axis upwards."""

    title: str
    probability: NDArray[np.float32]


@dataclass(frozen=True)
class Points:
    """Examples: coordinates (N, 2) and their classes (N,), 0 or 1."""

    title: str
    places: NDArray[np.float32]
    classes: NDArray[np.int64]


def plot_learning_curve(summary: TrainingSummary, picture: Path) -> None:
    """Draw accuracy and loss by round; rounds that were not scored are left out."""
    rows = [
        (row.round, 100 * row.accuracy, row.loss)
        for row in summary.rounds
        if row.accuracy is not None and row.loss is not None
    ]
    rounds, shares, losses = zip(*rows, strict=True) if rows else ((), (), ())
    figure = _figure(7.2, 4.2)
    left = figure.subplots()
    right = left.twinx()
    (accuracy,) = left.plot(rounds, shares, color=_COLOURS[0], marker="o", markersize=3, label="test accuracy")
    (loss,) = right.plot(rounds, losses, "--", color=_COLOURS[1], marker="s", markersize=3, label="test loss")
    left.set(xlabel="round", ylabel="accuracy (%)", ylim=(0, 100.5))
    right.set(ylabel="loss")
    right.set_ylim(bottom=0)
    left.grid(alpha=0.25)
    left.legend(handles=[accuracy, loss], loc="center right", frameon=False)
    reached = "not scored" if summary.final.accuracy is None else percent(summary.final.accuracy)
    left.set_title(f"{reached} after {summary.rounds[-1].round} rounds", loc="left")
    _save(figure, picture)


def plot_accuracy_curves(
    rows: Mapping[str, Mapping[str, Sequence[AccuracyCurve]]], picture: Path, *, across: str
) -> None:
    """Draw panels by row (such as a method) and column (such as a test set); a run has the same style in all.

    across: the name of the horizontal axis.
    """
    labels = list(dict.fromkeys(curve.label for row in rows.values() for panel in row.values() for curve in panel))
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    figure = _figure(3.6 * len(columns), 2.9 * len(rows) + 0.4)
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
    _save(figure, picture)


def plot_boundaries(models: Sequence[Boundary], sets: Sequence[Points], reach: float, picture: Path) -> None:
    """Draw models in the first row and sets of points in the second; both axes go from -reach to reach."""
    columns = max(len(models), len(sets))
    figure = _figure(3.2 * columns, 6.6)
    axes = figure.subplots(2, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, model in zip(axes[0], models, strict=False):
        axis.set_axis_on()
        axis.imshow(
            model.probability, origin="lower", extent=(-reach, reach, -reach, reach), cmap="PuOr", vmin=0, vmax=1
        )
        ticks = np.linspace(-reach, reach, len(model.probability))
        axis.contour(ticks, ticks, model.probability, levels=[0.5], colors="black", linewidths=1.2)
        axis.set_title(model.title, fontsize=9)
    for axis, points in zip(axes[1], sets, strict=False):
        axis.set_axis_on()
        for label in (0, 1):
            places, marker = points.places[points.classes == label], ("o", "x")[label]
            axis.scatter(*places.T, s=2, color=_COLOURS[label], marker=marker, linewidths=0.5, label=f"class {label}")
        axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        axis.set_title(points.title, fontsize=9)
    axes[1][0].legend(loc="lower left", fontsize=7, markerscale=3)
    _save(figure, picture)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, picture: Path) -> None:
    replace_atomically(picture, lambda temporary: figure.savefig(temporary, dpi=150))
