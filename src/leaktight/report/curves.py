"""The learning curve of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from leaktight.core.files import replace_atomically


def plot_learning_curve(summary: Path, picture: Path) -> None:
    """Accuracy and loss by round, from a run's summary.json to a PNG."""
    content: dict[str, Any] = json.loads(summary.read_text())
    rows = [row for row in content["rounds"] if row["accuracy"] is not None]
    rounds = [row["round"] for row in rows]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    right = left.twinx()
    percent, losses = [100 * row["accuracy"] for row in rows], [row["loss"] for row in rows]
    (accuracy,) = left.plot(rounds, percent, color="#0b5fa5", marker="o", markersize=3, label="test accuracy")
    (loss,) = right.plot(rounds, losses, "--", color="#b3541e", marker="s", markersize=3, label="test loss")
    left.set(xlabel="round", ylabel="accuracy (%)", ylim=(0, 100.5))
    right.set(ylabel="loss")
    right.set_ylim(bottom=0)
    left.grid(alpha=0.25)
    left.legend(handles=[accuracy, loss], loc="center right", frameon=False)
    final = content["final"]
    left.set_title(f"{100 * final['accuracy']:.2f} % after {content['rounds'][-1]['round']} rounds", loc="left")
    replace_atomically(picture, lambda temporary: figure.savefig(temporary, dpi=150))
