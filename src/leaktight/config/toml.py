"""Settings objects from TOML tables, with checks of every key and type, and back to tables."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, TypeVar, cast, overload, runtime_checkable

import pydantic

from leaktight.config.catalogue import (
    AGGREGATORS,
    ATTACKS,
    CATALOGUE,
    CIPHERS,
    DATASETS,
    DEFENSES,
    FUSIONS,
    GENERATORS,
    LABELS,
    SCHEDULES,
    Family,
)
from leaktight.config.fields import require_keys, require_kind
from leaktight.config.tables import as_list
from leaktight.core.errors import ConfigError
from leaktight.core.own import is_own, load_own
from leaktight.core.text import as_written
from leaktight.fl.aggregators import Linear

T = TypeVar("T")

_FAMILIES: Mapping[object, Family[object]] = {
    Linear: AGGREGATORS,
    **{
        family.base: family for family in (SCHEDULES, DATASETS, DEFENSES, ATTACKS, LABELS, CIPHERS, FUSIONS, GENERATORS)
    },
}
"""The family of the catalogue for a setting that is itself a method, by its declared type."""

_PLAIN = {
    "input should be": "expected",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
}
"""Words of pydantic, and ours."""


@runtime_checkable
class Recorded(Protocol):
    """Settings that TOML cannot express, such as a module; `record` returns what is written instead."""

    def record(self) -> dict[str, str]: ...


def choose(family: Family[T], value: object, where: str, table: str, also: Sequence[str] = ()) -> T:
    """A method of the family: the value itself if it is one, else an instance of the class of its `kind`.

    A string is a kind with default settings; a kind "package.module:Class" is a user's own class.
    where, table: the file and table that errors name. also: other valid keys, for suggestions.
    """
    if isinstance(value, family.base):
        return cast("T", value)
    if not isinstance(value, str | Mapping):
        raise ConfigError(f"{where}: expected a table [{table}] with a kind, got {as_written(value)}")
    settings = {"kind": value} if isinstance(value, str) else dict(value)
    kind = require_kind(family.kind, settings, where, table)
    del settings["kind"]
    if is_own(kind):
        return _own(family, kind, settings, where, table)
    return build(family[kind], settings, where, table, also=("kind", *also))


def _own(family: Family[T], target: str, settings: Mapping[str, object], where: str, table: str) -> T:
    cls = load_own(target, ConfigError)
    if not isinstance(cls, type):
        raise ConfigError(f"{where}: [{table}] expected {target} to be a class, got {type(cls).__name__}")
    if not is_dataclass(cls) and settings:
        raise ConfigError(
            f"{where}: [{table}] {target} takes no settings, got {', '.join(settings)}; make it a frozen dataclass, "
            "whose fields are its settings"
        )
    made: object = build(cls, settings, where, table, also=("kind",)) if is_dataclass(cls) else cls()
    if not isinstance(made, family.base):
        raise ConfigError(
            f"{where}: [{table}] expected {target} to be a subclass of "
            f"{family.base.__module__}.{family.base.__name__}, got a {cls.__name__}"
        )
    return cast("T", made)


def choose_all(family: Family[T], value: object, where: str, table: str) -> tuple[T, ...]:
    """The methods of a table or kind, or of a list of them."""
    if value == []:
        raise ConfigError(f"{where}: expected at least one table [[{table}]], got an empty list")
    return tuple(choose(family, item, where, table) for item in as_list(value))


def build(cls: type[T], settings: Mapping[str, object], where: str, table: str, also: Sequence[str] = ()) -> T:
    """An instance of a settings class from a table, after checks of every key and type."""
    if not is_dataclass(cls):
        raise ConfigError(f"{where}: [{table}] expected a dataclass, got {cls.__name__}")
    hints = typing.get_type_hints(cls)
    names = {field.name for field in fields(cls)}
    require_keys(settings, names, where, table, also)
    values = {key: _value(hints[key], key, value, where, table) for key, value in settings.items()}
    missing = [
        field.name
        for field in fields(cls)
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: [{table}] needs {', '.join(missing)}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: [{table}] {error}") from error


def _value(hint: object, key: str, value: object, where: str, table: str) -> object:
    if is_dataclass(value):
        return value
    family, several = family_of(hint)
    if family is None:
        return checked(hint, value, where, f"{table}.{key}")
    if not several:
        return choose(family, value, where, f"{table}.{key}")
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {table}.{key}: expected a list of tables, got {as_written(value)}")
    return tuple(choose(family, item, where, f"{table}.{key}") for item in value)


def family_of(hint: object) -> tuple[Family[object] | None, bool]:
    """The family that a setting of this type is chosen from, or None, and whether the setting is a list."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and inside:
        return family_of(inside[0])[0], True
    candidates = inside if origin in (typing.Union, UnionType) else (hint,)
    found = [_FAMILIES[each] for each in candidates if each in _FAMILIES]
    return (found[0] if found else None), False


def made(cls: type[T], value: object, where: str, table: str, also: Sequence[str] = ()) -> T:
    """An instance of `cls` from a table without kinds; the value itself if it is one."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a table [{table}], got {as_written(value)}")
    return build(cls, value, where, table, also)


@overload
def checked(hint: type[T], value: object, where: str, name: str) -> T: ...
@overload
def checked(hint: Any, value: object, where: str, name: str) -> object: ...
def checked(hint: Any, value: object, where: str, name: str) -> object:
    """The value converted to the type `hint`. Raises ConfigError, which names the setting, if that fails."""
    try:
        return pydantic.TypeAdapter(hint).validate_python(value)
    except pydantic.ValidationError as error:
        wanted = error.errors()[0]["msg"].partition(", unable")[0].lower()
        for theirs, ours in _PLAIN.items():
            wanted = wanted.replace(theirs, ours)
        raise ConfigError(f"{where}: {name}: {wanted}, got {as_written(value)}") from error


def kind_of(value: object) -> str | None:
    """The catalogue key of a method; "package.module:Class" for a user's own; None for other settings of Leaktight."""
    if isinstance(value, Recorded):
        return value.record()["kind"]
    cls = type(value)
    names = (family.name_of(cls) for family in CATALOGUE.values())
    own = None if cls.__module__.startswith("leaktight.") else f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name in names if name is not None), own)


def settings_of(value: object) -> dict[str, object]:
    """The settings of a method as plain values, without its kind and without those that are None."""
    return {name: item for name, item in table_of(value).items() if name != "kind"}


def table_of(value: object) -> dict[str, object]:
    """Settings as a TOML table, with the kind if it is a method, without those that are None."""
    if isinstance(value, Recorded):
        return dict(value.record())
    items = {field.name: getattr(value, field.name) for field in fields(value)} if is_dataclass(value) else {}
    settings = {name: plain(item) for name, item in items.items() if item is not None}
    return settings if (kind := kind_of(value)) is None else {"kind": kind, **settings}


def plain(value: object) -> object:
    """A setting as TOML can express it."""
    if is_dataclass(value):
        return table_of(value)
    if isinstance(value, frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
