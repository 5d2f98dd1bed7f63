"""The figure of a trade-off: accuracy against leakage, with the time of a round as the size of a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from leaktight.report.plots import Box, Drawing, Scale, place_label, text_width, ticks
from leaktight.report.words import defense_words, fact, metric_words, number, percent, seconds
from leaktight.results.schema import Summary, TradeoffRow

_DESCRIPTION = (
    "Further left leaks less, further up is more accurate, and a larger point takes longer. Filled points lie on the "
    "Pareto front: no other defense is as good in leakage, accuracy and time and better in one of them. "
    "The table after the figure holds the same numbers."
)


@dataclass(frozen=True, kw_only=True)
class _Spot:
    index: int
    row: TradeoffRow
    name: str
    leak: float
    accuracy: float


def row_names(rows: Sequence[TradeoffRow]) -> list[str]:
    """Defenses by name, and by those settings that tell equal names apart."""
    names = []
    for row in rows:
        others = [other.settings for other in rows if other.defense == row.defense and other is not row]
        own = {key: value for key, value in row.settings.items() if any(old.get(key) != value for old in others)}
        names.append(defense_words(row.defense) + (f" ({fact(own)})" if own else ""))
    return names


def pareto_plot(summary: Summary, *, anchor: str, width: float, height: float) -> Markup | None:
    """Accuracy against leakage, None where no defense has both. Points link to the rows `#tradeoff-1`, ..."""
    rows = summary.tradeoff.rows if summary.tradeoff else ()
    spots = [
        _Spot(index=index, row=row, name=name, leak=row.leak.worst, accuracy=row.accuracy)
        for index, (row, name) in enumerate(zip(rows, row_names(rows), strict=True), start=1)
        if row.leak.worst is not None and row.accuracy is not None
    ]
    if not spots:
        return None
    metric = spots[0].row.leak.metric
    title = f"Accuracy against leakage of {len(spots)} defenses"
    drawing = Drawing(anchor, width=width, height=height, title=title, description=_DESCRIPTION, links=True)
    leaks, accuracies = [spot.leak for spot in spots], [spot.accuracy for spot in spots]
    x_ticks = ticks(min(0.0, *leaks), max(leaks) if metric != "ssim" else max(1.0, *leaks), round(width / 100))
    y_ticks = ticks(min(accuracies), max(accuracies), 4)
    left, right = 52.0, width - 16
    leaks_right = summary.leaks_when(metric) == "high"
    across = Scale(x_ticks[0], x_ticks[-1], left if leaks_right else right, right if leaks_right else left)
    down = Scale(y_ticks[0], y_ticks[-1], height - 52, 44)
    drawing.axes(
        across,
        down,
        [(tick, f"{tick:g}") for tick in x_ticks],
        [(tick, f"{100 * tick:g} %") for tick in y_ticks],
    )
    drawing.names(f"{metric_words(metric).label}, most leaking trial: leaks more →", "↑ accuracy", down.start + 42)
    _draw_front(drawing, spots, across, down)
    _draw_points(drawing, spots, across, down)
    return drawing.markup()


def _draw_front(drawing: Drawing, spots: Sequence[_Spot], across: Scale, down: Scale) -> None:
    """A line along the upper left edge; points that are on the front for their speed alone are not on it."""
    places = sorted((across(spot.leak), down(spot.accuracy)) for spot in spots if spot.row.on_front)
    corners = [(x, y) for at, (x, y) in enumerate(places) if all(y < other for _, other in places[:at])]
    if len(corners) > 1:
        line = "L".join(f"{x:.2f} {y:.2f}" for x, y in corners)
        drawing.add("path", d=f"M{line}", class_="front", aria_hidden="true")


def _draw_points(drawing: Drawing, spots: Sequence[_Spot], across: Scale, down: Scale) -> None:
    slowest = max(spot.row.seconds_per_round or 0 for spot in spots) or 1
    radii = [5 + 7 * math.sqrt((spot.row.seconds_per_round or 0) / slowest) for spot in spots]
    places = [(across(spot.leak), down(spot.accuracy), radius) for spot, radius in zip(spots, radii, strict=True)]
    area = Box(2, 26, drawing.width - 4, down.start - 28)
    taken = [Box(x - radius, y - radius, 2 * radius, 2 * radius) for x, y, radius in places]
    large_first = sorted(zip(spots, places, strict=True), key=lambda pair: -pair[1][2])  # small points stay in reach
    for spot, (x, y, radius) in large_first:
        drawing.point(
            x,
            y,
            href=f"#tradeoff-{spot.index}",
            label=_label(spot),
            shape="circle",
            radius=radius,
            class_="on-front" if spot.row.on_front else "off-front",
        )
        name = _shortened(spot.name, drawing.width * 0.55)
        box = place_label(name, x, y, radius, taken, area)
        taken.append(box)
        drawing.add("text", text=name, x=box.left, y=box.top + 12.5, class_="point-name", aria_hidden="true")


def _label(spot: _Spot) -> str:
    row = spot.row
    front = ", on the front" if row.on_front else ""
    leak = f"{metric_words(row.leak.metric).label} {number(row.leak.worst, row.leak.metric)}"
    return f"{spot.name}: {leak}, accuracy {percent(row.accuracy)}, {seconds(row.seconds_per_round)} a round{front}"


def _shortened(name: str, width: float) -> str:
    while text_width(name) > width:
        name = name.rstrip("…")[:-1] + "…"
    return name
