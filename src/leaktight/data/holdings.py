"""Who holds what: a partition as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from leaktight.data.dataset import Dataset
from leaktight.data.partition import Partition

_MANY_CLIENTS = 30
_ENDS = 5  # clients shown from either end when there are many
_MANY_CLASSES = 10
_BAR_CLASSES = 64
_BARS = " ▁▂▃▄▅▆▇█"
_NAME_WIDTH = 6
_DPI = 110


def class_counts(dataset: Dataset, partition: Partition) -> NDArray[np.int64]:
    """How many examples of each class (columns) each client (rows) holds, training and validation together.

    A data set without classes (words) has one column.
    """
    targets = dataset.train.targets.numpy() if dataset.task.one_class else None
    rows = []
    for holding in partition.clients.values():
        indices = np.concatenate([holding.train.numpy(), holding.validation.numpy()])
        if targets is None:
            rows.append(np.array([len(indices)]))
        else:
            rows.append(np.bincount(targets[indices], minlength=dataset.num_classes))
    return np.stack(rows).astype(np.int64)


def label_skew(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """How far each client's classes are from those of all clients together: total variation distance, 0 to 1."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    overall = counts.sum(axis=0) / counts.sum()
    distances: NDArray[np.float64] = np.abs(shares - overall).sum(axis=1) / 2
    return distances


def text_summary(dataset: Dataset, partition: Partition) -> str:
    """A table of the clients; with many of them, the statistics of all and the largest and smallest clients."""
    counts = class_counts(dataset, partition)
    names = list(partition.clients)
    order = list(range(len(names)))
    lines = [_headline(dataset, partition, counts)]
    if len(names) > _MANY_CLIENTS:
        lines += ["", *_statistics(dataset, partition, counts)]
        by_size = sorted(order, key=lambda client: (-int(counts[client].sum()), client))
        order = [*by_size[:_ENDS], *by_size[-_ENDS:]]
        lines += ["", f"The {_ENDS} largest and the {_ENDS} smallest clients:"]
    return "\n".join([*lines, "", *_client_table(dataset, partition, counts, order)])


def _headline(dataset: Dataset, partition: Partition, counts: NDArray[np.int64]) -> str:
    clients = f"{len(partition)} client{'s' if len(partition) > 1 else ''}"
    text = f"{dataset.name}: {counts.sum()} of {len(dataset.train)} training examples on {clients}"
    if dataset.note:
        text = f"{text} ({dataset.note})"
    if not _has_classes(dataset):
        return text
    return f"{text}, {dataset.num_classes} classes; label skew {label_skew(counts).mean():.2f} (0: all alike)"


def _statistics(dataset: Dataset, partition: Partition, counts: NDArray[np.int64]) -> list[str]:
    holdings = partition.clients.values()
    measured: dict[str, list[float]] = {
        "train": [len(holding.train) for holding in holdings],
        "validation": [len(holding.validation) for holding in holdings],
    }
    if _has_classes(dataset):
        measured["classes"] = np.count_nonzero(counts, axis=1).tolist()
        measured["label skew"] = label_skew(counts).tolist()
    rows = [["per client", "min", "median", "mean", "max"]]
    for name, values in measured.items():
        rows.append([name, *map(_number, (min(values), median(values), fmean(values), max(values)))])
    return _aligned(rows)


def _client_table(dataset: Dataset, partition: Partition, counts: NDArray[np.int64], order: Iterable[int]) -> list[str]:
    names, holdings = list(partition.clients), list(partition.clients.values())
    rows = [["client", "train", "validation", *_class_headers(dataset)]]
    for client in order:
        row = [names[client], str(len(holdings[client].train)), str(len(holdings[client].validation))]
        rows.append(row + _class_cells(dataset, counts[client], int(counts.max())))
    return _aligned(rows)


def _has_classes(dataset: Dataset) -> bool:
    return dataset.task.one_class


def _class_headers(dataset: Dataset) -> list[str]:
    if not _has_classes(dataset):
        return []
    if dataset.num_classes <= _MANY_CLASSES:
        return ["classes", *(name[:_NAME_WIDTH] for name in dataset.class_names)]
    return ["classes", "examples of each class" if dataset.num_classes <= _BAR_CLASSES else "most frequent"]


def _class_cells(dataset: Dataset, counts: NDArray[np.int64], highest: int) -> list[str]:
    """Counts of a few classes, a bar for each of some, or the most frequent of many."""
    if not _has_classes(dataset):
        return []
    held = str(np.count_nonzero(counts))
    if len(counts) <= _MANY_CLASSES:
        return [held, *(str(count) if count else "." for count in counts.tolist())]
    if len(counts) <= _BAR_CLASSES:
        heights = np.ceil(counts / highest * (len(_BARS) - 1)).astype(int)
        return [held, "".join(_BARS[height] for height in heights.tolist())]
    top = [place for place in np.argsort(-counts, kind="stable")[:3].tolist() if counts[place]]
    return [held, ", ".join(f"{dataset.class_names[place]}: {counts[place]}" for place in top)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: words to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = [all(_is_number(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.2f}"


def _is_number(cell: str) -> bool:
    return cell == "." or cell.replace(".", "", 1).isdigit()


def plot_summary(dataset: Dataset, partition: Partition, path: Path) -> Path:
    """Write a PNG: a heat map of clients and classes with the counts, and beside it the size of each client."""
    counts = class_counts(dataset, partition)
    rows, columns = counts.shape
    tall = min(max(0.22 * rows, 2.5), 60.0)
    wide = min(max(0.5 * columns, 2.0), 14.0)
    figure = Figure(figsize=(wide + 4.0, tall + 1.6), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(wide, 2.0))
    _draw_counts(left, dataset, partition, counts)
    _draw_sizes(right, partition)
    figure.suptitle(_headline(dataset, partition, counts).replace(", ", ",\n", 1), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw_counts(axes: Axes, dataset: Dataset, partition: Partition, counts: NDArray[np.int64]) -> None:
    rows, columns = counts.shape
    image = axes.imshow(counts, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    step = max(1, -(-rows // 270))  # where rows get too thin for their names, name every step-th
    axes.set_yticks(range(0, rows, step), list(partition.clients)[::step], fontsize=7)
    if _has_classes(dataset):
        step = max(1, -(-columns // 50))
        axes.set_xticks(range(0, columns, step), dataset.class_names[::step], fontsize=7, rotation=90)
        axes.set_xlabel("class")
    else:
        axes.set_xticks([0], ["examples"], fontsize=7)
    if columns <= 30 and rows <= 270:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if count > counts.max() * 0.6 else "black"
                axes.text(column, row, str(count), ha="center", va="center", fontsize=6, color=colour)
    else:
        axes.figure.colorbar(image, ax=axes, location="left", label="examples", shrink=0.5, pad=0.02)


def _draw_sizes(axes: Axes, partition: Partition) -> None:
    train = [len(holding.train) for holding in partition.clients.values()]
    validation = [len(holding.validation) for holding in partition.clients.values()]
    places = range(len(train))
    axes.barh(places, train, color="tab:blue", label="train")
    axes.barh(places, validation, left=train, color="tab:orange", label="validation")
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("examples")
    axes.margins(y=0)
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
