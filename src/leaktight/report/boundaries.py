"""Decision boundaries of classifiers of points in the plane, beside the points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from leaktight.core.files import replace_atomically

_COLOURS = ("#0b5fa5", "#b3541e")


@dataclass(frozen=True)
class Boundary:
    """A classifier on a square grid: the probability of class 1, (G, G), the first axis upwards."""

    title: str
    probability: NDArray[np.float32]


@dataclass(frozen=True)
class Points:
    """Examples: coordinates (N, 2) and their classes (N,)."""

    title: str
    places: NDArray[np.float32]
    classes: NDArray[np.int64]


def plot_boundaries(models: Sequence[Boundary], sets: Sequence[Points], reach: float, picture: Path) -> None:
    """Models in the first row, sets of points in the second, to a PNG; both axes go from -reach to reach."""
    columns = max(len(models), len(sets))
    figure = Figure(figsize=(3.2 * columns, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
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
        for label, colour in enumerate(_COLOURS):
            places = points.places[points.classes == label]
            axis.scatter(*places.T, s=2, color=colour, marker=("o", "x")[label], linewidths=0.5, label=f"class {label}")
        axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        axis.set_title(points.title, fontsize=9)
    axes[1][0].legend(loc="lower left", fontsize=7, markerscale=3)
    replace_atomically(picture, lambda temporary: figure.savefig(temporary, dpi=150))
