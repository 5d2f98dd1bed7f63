"""Drawing charts as inline SVG: axes, points with links, labels. The page's style sheet sets the colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from markupsafe import Markup

SHAPES = ("circle", "square", "diamond", "triangle", "cross", "down")
"""Markers of series; later series repeat them with other dashes."""


Labels = Sequence[tuple[float, str]]
"""Values on an axis with their text."""


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True)
class Box:
    """A rectangle, in pixels."""

    left: float
    top: float
    width: float
    height: float

    def overlap(self, other: Box) -> float:
        """The area that the two share."""
        across = min(self.left + self.width, other.left + other.width) - max(self.left, other.left)
        down = min(self.top + self.height, other.top + other.height) - max(self.top, other.top)
        return max(across, 0.0) * max(down, 0.0)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover a range.

    >>> ticks(0, 1)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(3.2, 38)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    >>> ticks(5, 5)
    [4.0, 4.5, 5.0, 5.5, 6.0]
    """
    if high - low < 1e-9:
        low, high = low - 1, high + 1
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


class Drawing:
    """An SVG chart. The XML library escapes all text. links: points can be links."""

    def __init__(
        self, anchor: str, *, width: float, height: float, title: str, description: str, links: bool = False
    ) -> None:
        attributes = {
            "viewBox": f"0 0 {width:g} {height:g}",
            "class": "plot",
            "role": "group" if links else "img",
            "aria-labelledby": f"{anchor}-title {anchor}-desc",
        }
        self.width, self.height = width, height
        self.root = ElementTree.Element("svg", attributes)
        self.add("title", text=title, id=f"{anchor}-title")
        self.add("desc", text=description, id=f"{anchor}-desc")

    def add(
        self, tag: str, parent: ElementTree.Element | None = None, text: str | None = None, **attributes: object
    ) -> ElementTree.Element:
        """Append an element; underscores in attribute names become hyphens."""
        named = {name.strip("_").replace("_", "-"): _attribute(value) for name, value in attributes.items()}
        element = ElementTree.SubElement(self.root if parent is None else parent, tag, named)
        element.text = text
        return element

    def axes(self, across: Scale, down: Scale, x_ticks: Labels, y_ticks: Labels) -> None:
        """Grid lines and their numbers."""
        grid = self.add("g", class_="axis", aria_hidden="true")
        for value, label in y_ticks:
            y = down(value)
            self.add("line", grid, x1=across.start, x2=across.end, y1=y, y2=y)
            self.add("text", grid, label, x=across.start - 8, y=y + 4, text_anchor="end")
        for value, label in x_ticks:
            x = across(value)
            self.add("line", grid, x1=x, x2=x, y1=down.start, y2=down.start + 5)
            self.add("text", grid, label, x=x, y=down.start + 19, text_anchor="middle")

    def names(self, x_name: str, y_name: str, bottom: float) -> None:
        """The names of the axes; that of the vertical axis is written above it."""
        held = self.add("g", class_="axis-name", aria_hidden="true")
        self.add("text", held, y_name, x=4, y=18)
        self.add("text", held, x_name, x=self.width - 16, y=bottom, text_anchor="end")

    def point(
        self, x: float, y: float, *, label: str, shape: str, radius: float, class_: str, href: str | None = None
    ) -> None:
        """A marker with a tooltip; a link if `href` is given."""
        held = self.add("a" if href else "g", class_=f"point {class_}", data_tip=label)
        if href:
            held.attrib |= {"href": href, "aria-label": label}
        self.add("title", held, label)
        self.add("circle", held, cx=x, cy=y, r=max(radius + 2, 14), class_="hit")
        self.mark(held, x, y, shape, radius)

    def mark(self, parent: ElementTree.Element, x: float, y: float, shape: str, radius: float) -> None:
        """Draw a marker."""
        if shape == "circle":
            self.add("circle", parent, cx=x, cy=y, r=radius, class_="mark")
        else:
            self.add("path", parent, d=_path(shape, x, y, radius), class_="mark")

    def markup(self) -> Markup:
        return Markup(ElementTree.tostring(self.root, encoding="unicode"))  # escaped by ElementTree


def legend_mark(series: int) -> Markup:
    """The marker and dash of a series, for a legend."""
    root = ElementTree.Element("svg", {"viewBox": "0 0 36 14", "class": "legend-mark", "aria-hidden": "true"})
    held = ElementTree.SubElement(root, "g", {"class": f"series s{series % 6} d{series // 6 % 3}"})
    ElementTree.SubElement(held, "path", {"class": "trend", "d": "M1 7H35"})
    ElementTree.SubElement(held, "path", {"class": "mark", "d": _path(SHAPES[series % 6], 18, 7, 4.5)})
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def text_width(text: str, size: float = 13) -> float:
    """The approximate width of a text in a sans-serif font, in pixels."""
    return 0.56 * size * len(text)


def place_label(text: str, x: float, y: float, radius: float, taken: Sequence[Box], area: Box) -> Box:
    """The place of a label around a point that overlaps the `taken` boxes least and stays inside `area`."""
    width, height = text_width(text), 16.0
    gap = radius + 5
    options = [
        Box(x + gap, y - height / 2, width, height),
        Box(x - gap - width, y - height / 2, width, height),
        Box(x - width / 2, y - gap - height, width, height),
        Box(x - width / 2, y + gap, width, height),
        Box(x + gap * 0.7, y - gap * 0.7 - height, width, height),
        Box(x + gap * 0.7, y + gap * 0.7, width, height),
        Box(x - gap * 0.7 - width, y - gap * 0.7 - height, width, height),
        Box(x - gap * 0.7 - width, y + gap * 0.7, width, height),
    ]

    def cost(box: Box) -> float:
        outside = box.width * box.height - box.overlap(area)
        return outside * 4 + sum(box.overlap(other) for other in taken)

    return min(options, key=cost)


def _attribute(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _path(shape: str, x: float, y: float, r: float) -> str:
    corners = {
        "circle": [(math.cos(turn), math.sin(turn)) for turn in (math.pi * step / 8 for step in range(16))],
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "diamond": [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
        "triangle": [(0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
        "down": [(0, 1.2), (1.1, -0.9), (-1.1, -0.9)],
        "cross": [corner for side in ((1, 1), (-1, 1), (-1, -1), (1, -1)) for corner in _arm(*side)],
    }[shape]
    return "M" + "L".join(f"{x + r * dx:.5g} {y + r * dy:.5g}" for dx, dy in corners) + "Z"


def _arm(right: int, down: int) -> list[tuple[float, float]]:
    """The corners of a quarter of a cross, in drawing order."""
    arm = [(1.1 * right, 0.4 * down), (0.4 * right, 0.4 * down), (0.4 * right, 1.1 * down)]
    return arm if right == down else arm[::-1]
