"""Figures of leakage and accuracy by round: one panel each, a series for every attack on every defense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from leaktight.report.plots import SHAPES, Drawing, Scale, legend_mark, ticks
from leaktight.report.words import attack_words, defense_words, metric_words, number, percent, significant
from leaktight.results.schema import UNDEFENDED, Direction, Moment, Summary

_WIDTH, _HEIGHT = 360.0, 256.0


@dataclass(frozen=True)
class Quantity:
    """What a panel shows: a metric of the moments, or their "accuracy". leaks: which way a metric leaks."""

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
    """One line of the panels, as its legend shows it."""

    name: str
    mark: Markup


def legend(moments: Sequence[Moment]) -> list[Series]:
    """The series in the order of their colours and markers."""
    return [Series(_name(*key), legend_mark(number)) for number, key in enumerate(_keys(moments))]


def panels(summary: Summary) -> list[Markup]:
    """One figure each for PSNR, SSIM and accuracy, as far as they were measured."""
    shown = [Quantity(name, summary.leaks_when(name)) for name in ("psnr", "ssim")]
    drawn = [_panel(summary.over_time or (), each) for each in (*shown, Quantity("accuracy"))]
    return [panel for panel in drawn if panel is not None]


def _key(moment: Moment) -> tuple[str, str, bool]:
    return moment.defense, moment.attack, moment.adaptive


def _keys(moments: Sequence[Moment]) -> list[tuple[str, str, bool]]:
    """The series, those of the undefended update first."""
    return sorted(dict.fromkeys(_key(moment) for moment in moments), key=lambda key: key[0] != UNDEFENDED)


def _name(defense: str, attack: str, adaptive: bool) -> str:
    return f"{attack_words(attack, adaptive)} on {defense_words(defense)}"


def _panel(moments: Sequence[Moment], shown: Quantity) -> Markup | None:
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
        _draw_series(drawing, sorted(mine, key=lambda moment: moment.round), series, shown, across, down)
    return drawing.markup()


def _draw_series(
    drawing: Drawing, moments: Sequence[Moment], series: int, shown: Quantity, across: Scale, down: Scale
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
        name = f"{_name(*_key(moment))}, round {moment.round}"
        drawing.point(
            across(moment.round),
            down(value),
            label=f"{name}: {shown.label} {shown.written(value)}",
            shape=SHAPES[series % len(SHAPES)],
            radius=4,
            class_=style,
        )
