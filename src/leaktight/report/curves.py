"""The learning curve of a training run."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from leaktight.core.files import replace_atomically
from leaktight.results.schema import TrainingSummary


def plot_learning_curve(summary: TrainingSummary, picture: Path) -> None:
    """Accuracy and loss by round, to a PNG; rounds that were not scored are left out."""
    rows = [
        (row.round, 100 * row.accuracy, row.loss)
        for row in summary.rounds
        if row.accuracy is not None and row.loss is not None
    ]
    rounds, percent, losses = zip(*rows, strict=True) if rows else ((), (), ())
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    right = left.twinx()
    (accuracy,) = left.plot(rounds, percent, color="#0b5fa5", marker="o", markersize=3, label="test accuracy")
    (loss,) = right.plot(rounds, losses, "--", color="#b3541e", marker="s", markersize=3, label="test loss")
    left.set(xlabel="round", ylabel="accuracy (%)", ylim=(0, 100.5))
    right.set(ylabel="loss")
    right.set_ylim(bottom=0)
    left.grid(alpha=0.25)
    left.legend(handles=[accuracy, loss], loc="center right", frameon=False)
    reached = "not scored" if summary.final.accuracy is None else f"{100 * summary.final.accuracy:.2f} %"
    left.set_title(f"{reached} after {summary.rounds[-1].round} rounds", loc="left")
    replace_atomically(picture, lambda temporary: figure.savefig(temporary, dpi=150))
