"""All that is known of one method, from its class and docstring: settings, what it assumes, its source, an example."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from itertools import zip_longest
from pathlib import Path

import tomli_w

from leaktight.config.catalogue import CATALOGUE
from leaktight.config.fields import FAMILIES, known_fields, words
from leaktight.config.names import ENTRIES
from leaktight.config.recipes import PREFIX, about, config_file
from leaktight.config.toml import plain
from leaktight.core.errors import UsageError, suggestion

_TABLES = {family: table for table, family in FAMILIES.items()}
_SEVERAL = {"attack", "defense"}
_LABEL = re.compile(r"(?:^|(?<=\.\s))([A-Z][a-z]+(?: [a-z]+){0,4}): ", re.MULTILINE)
_SETTINGS = re.compile(r"(?:^|(?<=[.;!?]\s))([a-z_0-9]+(?:, [a-z_0-9]+)*): ", re.MULTILINE)


@dataclass(frozen=True)
class Setting:
    """A setting. kind: its type in words. default: as in TOML; None if it has to be given, "" if none is set."""

    name: str
    kind: str
    default: str | None
    meaning: str


@dataclass(frozen=True)
class Details:
    """notes: what else its docstring says, by label ("Reference", "Assumes", ...), without a label under "".

    example: a TOML table with the defaults; empty for what is no table of its own.
    """

    name: str
    description: str
    settings: tuple[Setting, ...]
    notes: Mapping[str, str]
    example: str


def details(family: str, name: str) -> Details:
    """What `leaktight list FAMILY NAME` shows."""
    if name not in ENTRIES[family]:
        raise UsageError(f"there is no {name!r} among the {family}; {suggestion(name, ENTRIES[family])}")
    description = ENTRIES[family][name].description
    if family not in CATALOGUE:
        return Details(name, description, (), {}, "")
    method = CATALOGUE[family][name]
    own = {field.name: field for field in fields(method)} if is_dataclass(method) else {}
    types = known_fields()[family][name]
    meanings = _meanings(method, own)
    defaults = {key: _default(field) for key, field in own.items()}
    settings = tuple(
        Setting(key, _kind(types.get(key, {})), _shown(value), meanings.get(key, "")) for key, value in defaults.items()
    )
    return Details(name, description, settings, _notes(method, own), _example(family, name, defaults))


def recipe_details(name: str) -> Details:
    """What `leaktight list recipes NAME` shows: what the recipe is, its file, and its whole config."""
    file = config_file(Path(f"{PREFIX}{name}"))
    return Details(name, about(file), (), {"File": str(file)}, file.read_text(encoding="utf-8"))


def _kind(field: Mapping[str, object]) -> str:
    if "family" in field:
        return f"a method of `leaktight list {field['family']}`"
    return words(field) if field else ""


def _default(field: Field[object]) -> object:
    """The default as a plain value; MISSING if there is none."""
    if field.default_factory is not MISSING:
        return plain(field.default_factory())
    return MISSING if field.default is MISSING else plain(field.default)


def _shown(value: object) -> str | None:
    if value is MISSING:
        return None
    if isinstance(value, Mapping):
        return str(value.get("kind", "a table"))
    return "" if value is None else tomli_w.dumps({"it": value}).removeprefix("it = ").replace("\n", "")


def _example(family: str, name: str, defaults: Mapping[str, object]) -> str:
    table = _TABLES.get(family)
    if table is None:
        return ""
    given = {key: value for key, value in defaults.items() if value is not None and value is not MISSING}
    needed = "".join(f"# {key} = ...  has to be given\n" for key, value in defaults.items() if value is MISSING)
    content: dict[str, object] = {"kind": name, **given}
    for key in reversed(table.split(".")):
        content = {key: [content] if key in _SEVERAL else content}
    first = f'kind = "{name}"\n'
    return tomli_w.dumps(content).replace(first, first + needed, 1)


def _paragraphs(method: type) -> list[str]:
    """The paragraphs of its own docstring, without examples; the first is the description."""
    text = inspect.cleandoc(method.__dict__.get("__doc__") or "")
    return [paragraph for paragraph in text.split("\n\n") if not paragraph.startswith(">>>")]


def _meanings(method: type, names: Collection[str]) -> dict[str, str]:
    """What the docstrings say of each setting ("name: meaning", "one, two: meaning"); the nearest class wins."""
    found: dict[str, str] = {}
    for cls in method.__mro__:
        for paragraph in _paragraphs(cls):
            for stated, meaning in _stated(paragraph, names):
                for name in stated:
                    found.setdefault(name, meaning)
    return found


def _stated(paragraph: str, names: Collection[str]) -> Iterator[tuple[list[str], str]]:
    """The settings that a paragraph explains."""
    starts = [match for match in _SETTINGS.finditer(paragraph) if set(match[1].split(", ")) <= set(names)]
    for match, after in zip_longest(starts, starts[1:]):
        meaning = paragraph[match.end() : after.start() if after else None]
        if label := _LABEL.search(meaning):
            meaning = meaning[: label.start()]
        yield match[1].split(", "), " ".join(meaning.split())


def _notes(method: type, names: Collection[str]) -> dict[str, str]:
    """What the docstring says beside its settings, by label."""
    found: dict[str, list[str]] = {}
    for paragraph in _paragraphs(method)[1:]:
        label, start = "", 0
        for match in [*_LABEL.finditer(paragraph), None]:
            piece = paragraph[start : match.start() if match else None]
            if not label and (setting := next(iter(_stated_places(piece, names)), None)) is not None:
                piece = piece[:setting]
            if piece.strip():
                found.setdefault(label, []).append(" ".join(piece.split()))
            if match:
                label, start = match[1], match.end()
    return {label: " ".join(pieces) for label, pieces in found.items()}


def _stated_places(paragraph: str, names: Collection[str]) -> Iterator[int]:
    return (match.start() for match in _SETTINGS.finditer(paragraph) if set(match[1].split(", ")) <= set(names))
