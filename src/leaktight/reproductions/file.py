"""The files of a recipe: its table `[recipe]` with all that is said in short spelt out, and its published numbers."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from leaktight.config.recipes import recipes
from leaktight.config.tables import RECIPE
from leaktight.core.errors import ConfigError, suggestion
from leaktight.core.reading import read_toml

MAIN = "main"
"""The name of a part that has none."""
_PART = "{part}"


def spelt_out(path: Path) -> dict[str, Any]:
    """The table `[recipe]` of a file with all its parts: those of another recipe, products of axes, and own ones."""
    table: dict[str, Any] = read_toml(path, ConfigError).get(RECIPE, {})
    own = _products(table.get("axes", {}), table.get("each", {}), table.get("parts", []))
    scales = table.get("scales", {})
    if like := table.get("like"):
        if like not in (known := recipes()):
            raise ConfigError(f"{path}: [recipe] like: no recipe {like!r}; {suggestion(like, list(known))}")
        other = spelt_out(known[like])
        table = {**table, "use": _used(table.get("use", {} if own else ["*"]), other, path)}
        theirs = {part["name"]: part for part in other["parts"]}
        own = [*({**theirs[name], "name": here} for here, name in table["use"].items()), *own]
        scales = {name: {"set": _settings(other, name), **scale} for name, scale in scales.items()}
    own = own or [{"name": MAIN}]
    known_parts = [part["name"] for part in own]
    scales = {
        name: {**scale, "parts": _matching(scale["parts"], known_parts)} if "parts" in scale else scale
        for name, scale in scales.items()
    }
    for key in ("rows", "columns"):
        if isinstance(names := table.get(key), list):
            table = {**table, key: {name: {} for name in names}}
    return {**table, "parts": own, "scales": scales}


def _used(use: Mapping[str, str] | Sequence[str], other: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The parts of another recipe that a recipe uses, by the names that they have in it."""
    known = [part["name"] for part in other["parts"]]
    named = dict(use) if isinstance(use, Mapping) else {name: name for name in _matching(use, known)}
    if missing := [name for name in named.values() if name not in known]:
        raise ConfigError(f"{path}: [recipe] use: no part {missing[0]!r}; {suggestion(missing[0], known)}")
    return named


def _settings(table: Mapping[str, Any], scale: str) -> list[str]:
    """The settings of a scale."""
    found: list[str] = table.get("scales", {}).get(scale, {}).get("set", [])
    return found


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The patterns themselves, or if one has a "*" the names that match, in their order; then those without a match."""
    if not any("*" in each for each in patterns):
        return list(patterns)
    missing = [each for each in patterns if not any(fnmatchcase(name, each) for name in names)]
    return [*(name for name in names if any(fnmatchcase(name, each) for each in patterns)), *missing]


def _products(
    axes: Mapping[str, Mapping[str, Any]], each: Mapping[str, Any], own: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A part for each choice of one entry of each axis, and the own parts of other names."""
    named = {part.get("name", MAIN): part for part in own}
    made = {}
    for entries in itertools.product(*(axis.items() for axis in axes.values())) if axes else ():
        name = " ".join(word for word, _ in entries)
        made[name] = _joined([each, *(part for _, part in entries), named.get(name, {})], name)
    return [*made.values(), *(_joined([each, part], name) for name, part in named.items() if name not in made)]


def _joined(parts: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """One part with the settings of all, in their order."""

    def spelt(settings: Sequence[str]) -> list[str]:
        return [each.replace(_PART, name) for each in settings]

    joined: dict[str, Any] = {}
    at: dict[str, list[str]] = {}
    for part in parts:
        joined |= part
        for scale, settings in part.get("at", {}).items():
            at[scale] = [*at.get(scale, []), *spelt(settings)]
    settings = [each for part in parts for each in spelt(part.get("set", []))]
    return {**joined, "name": name, "set": settings, "at": at}


def published(path: Path) -> dict[str, dict[str, str]]:
    """The published numbers by row and column; empty places are left out. Without a file, none."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(line for line in file if not line.startswith("#"))
    return {
        row: {column: text for column, text in zip(header[1:], entries, strict=True) if text} for row, *entries in rows
    }
