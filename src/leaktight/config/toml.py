"""Tables of TOML to the settings of methods, and back: every key known, every value of its type."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any

import pydantic

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.config.catalogue import AGGREGATORS, CATALOGUE, CIPHERS, DATASETS, DEFENSES, FUSIONS, LABELS, SCHEDULES
from leaktight.core.errors import ConfigError, suggestion
from leaktight.core.protocols import Defense
from leaktight.core.training import Schedule
from leaktight.crypto.cipher import Cipher
from leaktight.data.dataset import DatasetSource
from leaktight.fl.aggregators import Linear
from leaktight.fl.fusion import Fusion
from leaktight.models.gan import GENERATORS, GeneratorSource
from leaktight.models.user import UserModel

_FAMILIES: Mapping[Any, Mapping[str, Any]] = {
    Schedule: SCHEDULES,
    DatasetSource: DATASETS,
    Defense: DEFENSES,
    LabelStrategy: LABELS,
    Linear: AGGREGATORS,
    Cipher: CIPHERS,
    Fusion: FUSIONS,
    GeneratorSource: GENERATORS,
}
"""Where a setting that is itself a method is looked up, by the type that the settings class gives it."""


def choose(choices: Mapping[str, Any], value: Any, where: str, table: str, also: Sequence[str] = ()) -> Any:
    """An instance of the class that `kind` names; a bare string is a kind with its defaults."""
    if not isinstance(value, str | Mapping):
        raise ConfigError(f"{where}: expected a table [{table}] with a kind, got {value!r}")
    settings = {"kind": value} if isinstance(value, str) else dict(value)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: [{table}] needs kind; {suggestion('', choices)}")
    if kind not in choices:
        raise ConfigError(f"{where}: [{table}] unknown kind {kind!r}; {suggestion(kind, choices)}")
    return build(choices[kind], settings, where, table, also=("kind", *also))


def choose_all(choices: Mapping[str, Any], value: Any, where: str, table: str) -> tuple[Any, ...]:
    """One instance for a table or a kind, several for a list of them."""
    if value == []:
        raise ConfigError(f"{where}: expected at least one table [[{table}]], got an empty list")
    return tuple(choose(choices, item, where, table) for item in as_list(value))


def build(cls: type, settings: Mapping[str, Any], where: str, table: str, also: Sequence[str] = ()) -> Any:
    """An instance of a settings class from a table, every key known and every value of its type."""
    hints = typing.get_type_hints(cls)
    names = {field.name for field in fields(cls)}
    for key in settings:
        if key not in names:
            raise ConfigError(f"{where}: [{table}] unknown key {key!r}; {suggestion(key, {*names, *also})}")
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


def _value(hint: Any, key: str, value: Any, where: str, table: str) -> Any:
    if is_dataclass(value):
        return value
    choices, several = _family(hint)
    if choices is None:
        return checked(hint, value, where, f"{table}.{key}")
    if not several:
        return choose(choices, value, where, f"{table}.{key}")
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {table}.{key}: expected a list of tables, got {value!r}")
    return tuple(choose(choices, item, where, f"{table}.{key}") for item in value)


def _family(hint: Any) -> tuple[Mapping[str, Any] | None, bool]:
    """The part of the catalogue that a setting of this type is chosen from, if any, and whether it is a list."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and inside:
        return _family(inside[0])[0], True
    candidates = inside if origin in (typing.Union, UnionType) else (hint,)
    found = [_FAMILIES[each] for each in candidates if each in _FAMILIES]
    return (found[0] if found else None), False


def checked(hint: Any, value: Any, where: str, name: str) -> Any:
    """The value as its type has it, or an error that names the setting."""
    try:
        return pydantic.TypeAdapter(hint).validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{where}: {name}: {first['msg'].lower()}, got {value!r}") from error


def kind_of(value: Any) -> str | None:
    """The catalogue key of an instance."""
    names = (family.name_of(type(value)) for family in CATALOGUE.values())
    return next((name for name in names if name is not None), None)


def settings_of(value: Any) -> dict[str, Any]:
    """The settings of a method as plain values, without its kind; those that are None are left out."""
    return {name: item for name, item in plain(value).items() if name != "kind"}


def one_or_all(entries: Sequence[Any]) -> Any:
    """Settings as TOML can say them: one table, or a list of several."""
    return plain(entries[0]) if len(entries) == 1 else plain(entries)


def plain(value: Any) -> Any:
    """Settings as TOML can say them; None is left out."""
    if isinstance(value, UserModel):
        return {"kind": value.target}
    if is_dataclass(value):
        kind = kind_of(value)
        items = {field.name: getattr(value, field.name) for field in fields(value)}
        settings = {name: plain(item) for name, item in items.items() if item is not None}
        return {"kind": kind, **settings} if kind else settings
    if isinstance(value, frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def as_list(value: Any) -> list[Any]:
    """What may be one or several, as several."""
    return list(value) if isinstance(value, list) else [value]
