"""The SVG charts of the page: the trade-off of defenses, and leakage and accuracy by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from leaktight.report.plots import SHAPES, Box, Drawing, Scale, legend_mark, place_label, text_width, ticks
from leaktight.report.words import (
    attack_words,
    defense_name,
    metric_words,
    number,
    percent,
    seconds,
    significant,
    tradeoff_names,
)
from leaktight.results.schema import UNDEFENDED, Direction, Moment, Summary, TradeoffRow

_WIDTH, _HEIGHT = 360.0, 256.0
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


def pareto_plot(summary: Summary, *, anchor: str, width: float, height: float) -> Markup | None:
    """Accuracy against leakage, the size of a point showing the time per round; None if no defense has both.

    Points link to the table rows `#tradeoff-1`, `#tradeoff-2`, ...
    """
    rows = summary.tradeoff.rows if summary.tradeoff else ()
    spots = [
        _Spot(index=index, row=row, name=name, leak=row.leak.worst, accuracy=row.accuracy)
        for index, (row, name) in enumerate(zip(rows, tradeoff_names(rows), strict=True), start=1)
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
    """A line through the points of the front, except those that are on it only for their speed."""
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
    large_first = sorted(zip(spots, places, strict=True), key=lambda pair: -pair[1][2])  # small points are drawn on top
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


@dataclass(frozen=True)
class Quantity:
    """What a panel shows: a metric, or "accuracy". leaks: which way the metric leaks."""

    name: str
    leaks: Direction | None = None

    @property
    def label(self) -> str:
        return "Accuracy" if self.name == "accuracy" else metric_words(self.name).label

    @property
    def axis(self) -> str:
        unit = metric_words(self.name).unit
        leaks = f", {self.leaks}er leaks more" if self.leaks else ""
        return f"{self.label}{f' ({unit})' if unit else ''}{leaks}"

    def value(self, moment: Moment) -> float | None:
        return moment.accuracy if self.name == "accuracy" else moment.mean_of(self.name)

    def band(self, moment: Moment) -> tuple[float, float] | None:
        score = moment.scores.get(self.name)
        low, high = (score.ci95 or (None, None)) if score else (None, None)
        return (low, high) if low is not None and high is not None else None

    def on_axis(self, value: float) -> str:
        return f"{100 * value:.4g} %" if self.name == "accuracy" else significant(value)

    def written(self, value: float) -> str:
        return percent(value) if self.name == "accuracy" else number(value, self.name)


@dataclass(frozen=True)
class Series:
    """An entry of the legend."""

    name: str
    mark: Markup


def legend(summary: Summary) -> list[Series]:
    """The series of all panels, in the order of their colours and markers."""
    keys = _keys(summary.over_time or ())
    return [Series(_name(summary, *key), legend_mark(number)) for number, key in enumerate(keys)]


def panels(summary: Summary) -> list[Markup]:
    """A chart each for PSNR, SSIM and accuracy by round, if measured."""
    shown = [Quantity(name, summary.leaks_when(name)) for name in ("psnr", "ssim")]
    drawn = [_panel(summary, each) for each in (*shown, Quantity("accuracy"))]
    return [panel for panel in drawn if panel is not None]


def _key(moment: Moment) -> tuple[str, str, bool]:
    return moment.defense, moment.attack, moment.adaptive


def _keys(moments: Sequence[Moment]) -> list[tuple[str, str, bool]]:
    """The series, those without a defense first."""
    return sorted(dict.fromkeys(_key(moment) for moment in moments), key=lambda key: key[0] != UNDEFENDED)


def _name(summary: Summary, defense: str, attack: str, adaptive: bool) -> str:
    return f"{attack_words(attack, adaptive)} on {defense_name(summary, defense)}"


def _panel(summary: Summary, shown: Quantity) -> Markup | None:
    moments = summary.over_time or ()
    values = [value for moment in moments if (value := shown.value(moment)) is not None]
    if not values:
        return None
    edges = [edge for moment in moments for edge in shown.band(moment) or ()]
    rounds = [moment.round for moment in moments]
    y_ticks = ticks(min(values + edges), max(values + edges), 4)
    x_ticks = [tick for tick in ticks(min(rounds), max(rounds), 5) if tick == int(tick)]
    across = Scale(x_ticks[0], x_ticks[-1], 52, _WIDTH - 16)
    down = Scale(y_ticks[0], y_ticks[-1], _HEIGHT - 52, 40)
    drawing = Drawing(
        f"time-{shown.name}",
        width=_WIDTH,
        height=_HEIGHT,
        title=f"{shown.label} by round",
        description="Bands are 95 % intervals. The table after the figures holds the same numbers.",
    )
    drawing.axes(
        across,
        down,
        [(tick, f"{tick:g}") for tick in x_ticks],
        [(tick, shown.on_axis(tick)) for tick in y_ticks],
    )
    drawing.names("round", shown.axis, down.start + 42)
    for series, key in enumerate(_keys(moments)):
        mine = [moment for moment in moments if _key(moment) == key]
        ordered = sorted(mine, key=lambda moment: moment.round)
        _draw_series(drawing, _name(summary, *key), ordered, series, shown, across, down)
    return drawing.markup()


def _draw_series(
    drawing: Drawing, name: str, moments: Sequence[Moment], series: int, shown: Quantity, across: Scale, down: Scale
) -> None:
    style = f"series s{series % 6} d{series // 6 % 3}"
    group = drawing.add("g", class_=style)
    bands = [(across(moment.round), band) for moment in moments if (band := shown.band(moment))]
    if len(bands) > 1:
        edge = [(x, high) for x, (_, high) in bands] + [(x, low) for x, (low, _) in reversed(bands)]
        drawing.add("path", group, class_="band", d=f"M{'L'.join(f'{x:.2f} {down(y):.2f}' for x, y in edge)}Z")
    known = [(moment, value) for moment in moments if (value := shown.value(moment)) is not None]
    line = "L".join(f"{across(moment.round):.2f} {down(value):.2f}" for moment, value in known)
    drawing.add("path", group, class_="trend", d=f"M{line}" if line else "")
    for moment, value in known:
        drawing.point(
            across(moment.round),
            down(value),
            label=f"{name}, round {moment.round}: {shown.label} {shown.written(value)}",
            shape=SHAPES[series % len(SHAPES)],
            radius=4,
            class_=style,
        )
