"""Recipes: configs of published experiments that are part of the package, `recipe:NAME` wherever a config is named."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from leaktight.core.errors import ConfigError, suggestion

PREFIX = "recipe:"
_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z])")


def recipes() -> dict[str, Path]:
    """The files of all recipes, by name."""
    folder = Path(str(resources.files("leaktight").joinpath("recipes")))
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def about(file: Path) -> str:
    """What a recipe is: the first sentence of its comment."""
    found = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if found.endswith(".") or not line.startswith("#"):
            break
        found = f"{found} {line.lstrip('# ')}".strip()
    return _SENTENCE.split(found)[0]


def config_file(path: Path) -> Path:
    """The file of a config: that of a recipe for `recipe:NAME`, else `path` itself."""
    known, name = recipes(), str(path)
    if name.startswith(PREFIX):
        named = name.removeprefix(PREFIX).removesuffix(".toml")
        if named not in known:
            raise ConfigError(f"there is no recipe {named!r}; {suggestion(named, known)}")
        return known[named]
    if path.stem in known and not path.exists():
        raise ConfigError(f"there is no file {path}; for the recipe of this name, write {PREFIX}{path.stem}")
    return path
