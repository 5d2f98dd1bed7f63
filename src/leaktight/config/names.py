"""The names of all methods, where each is defined, and its one line of description: `names.toml`.

No method is imported for it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple


class Entry(NamedTuple):
    """target: "package.module:name". description: the start of its docstring."""

    target: str
    description: str


def _read() -> dict[str, dict[str, Entry]]:
    families = tomllib.loads(resources.files("leaktight.config").joinpath("names.toml").read_text(encoding="utf-8"))
    return {family: {name: Entry(*line) for name, line in lines.items()} for family, lines in families.items()}


ENTRIES: Mapping[str, Mapping[str, Entry]] = _read()
"""Entries by name, by family."""
