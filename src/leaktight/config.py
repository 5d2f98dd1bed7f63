"""Configuration: TOML to frozen, validated settings, and back to TOML for the record.

An unknown key is an error that names the file, the table, the key and the nearest valid key. What a config leaves out
comes from the built-in scenario. A table with another `kind` than the scenario's starts from that kind's own defaults.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pydantic
import tomli_w

from leaktight.catalogue import AGGREGATORS, CATALOGUE, DATASETS, DEFENSES, PARTITIONS, SCHEDULES
from leaktight.core.errors import ConfigError, suggestion
from leaktight.core.protocols import Aggregator, Defense
from leaktight.core.threat import ThreatModel
from leaktight.core.training import LocalTraining
from leaktight.data.dataset import DatasetSource
from leaktight.data.partition import Scheme
from leaktight.fl.protocol import FederationPlan
from leaktight.models import MODELS
from leaktight.models.source import ModelSource
from leaktight.models.user import UserModel

SCENARIO = """
seed = 0
[data]
kind = "digits"
[partition]
kind = "shards"
clients = 20
shards_per_client = 2
[model]
kind = "lenet_zhu"
activation = "relu"
[local]
epochs = 5
batch_size = 16
learning_rate = 0.05
schedule = {kind = "cosine"}
[federation]
rounds = 50
per_round = 10
"""
"""What runs without a config: everything is embedded, nothing is downloaded."""

_NESTED: Mapping[str, Mapping[str, Any]] = {"schedule": SCHEDULES, "aggregator": AGGREGATORS, "parts": DATASETS}


@dataclass(frozen=True)
class ModelChoice:
    """A network with where its weights come from ("default", "wide" or a file) and the mode in which clients run it."""

    source: ModelSource
    init: str = "default"
    mode: Literal["train", "eval"] = "train"


@dataclass(frozen=True)
class Config:
    """The resolved configuration of a run."""

    seed: int
    data: DatasetSource
    data_root: Path | None
    partition: Scheme
    model: ModelChoice
    local: LocalTraining
    plan: FederationPlan
    aggregator: Aggregator
    defense: Defense
    threat: ThreatModel

    def to_toml(self) -> str:
        """The whole configuration, defaults included, as TOML that gives this configuration again."""
        tables = {
            "seed": self.seed,
            "data": {**_plain(self.data), **({"root": str(self.data_root)} if self.data_root else {})},
            "partition": _plain(self.partition),
            "model": {**_plain(self.model.source), "init": self.model.init, "mode": self.model.mode},
            "local": _plain(self.local),
            "federation": {**_plain(self.plan), "aggregator": _plain(self.aggregator)},
            "defense": _plain(self.defense),
            "threat": _plain(self.threat),
        }
        return tomli_w.dumps(tables)


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a config (or the built-in scenario), apply `table.key=value` overrides, and validate everything."""
    where = str(path) if path else "built-in scenario"
    tables = tomllib.loads(SCENARIO)
    if path is not None:
        tables = _merged(tables, _read(path))
    for override in overrides:
        tables = _merged(tables, _parse_override(override))
    return _resolve(tables, where)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _merged(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`other` over `base`, key by key; a table of another kind replaces the table."""
    result = dict(base)
    for key, value in other.items():
        before = base.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and _same_kind(before, value):
            result[key] = _merged(before, value)
        else:
            result[key] = value
    return result


def _same_kind(before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return bool(value.get("kind", before.get("kind")) == before.get("kind"))


def _parse_override(text: str) -> dict[str, Any]:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"expected --set table.key=value, got {text!r}")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for key in reversed(path.strip().split(".")):
        parsed = {key: parsed}
    result: dict[str, Any] = parsed
    return result


def _resolve(tables: dict[str, Any], where: str) -> Config:
    known = {"seed", "data", "partition", "model", "local", "federation", "defense", "threat"}
    for name in tables:
        if name not in known:
            raise ConfigError(f"{where}: unknown table {name!r}; {suggestion(name, known)}")
        if name != "seed" and not isinstance(tables[name], Mapping):
            raise ConfigError(f"{where}: expected a table [{name}], got {tables[name]!r}")
    data, model, federation = ({**tables[name]} for name in ("data", "model", "federation"))
    root = data.pop("root", None)
    choice = {key: model.pop(key) for key in ("init", "mode") if key in model}
    aggregator = federation.pop("aggregator", "fedavg")
    source = _model_source(model, where)
    return Config(
        seed=_checked(int, tables["seed"], where, "seed"),
        data=_choose(DATASETS, data, where, "data", also=("root",)),
        data_root=None if root is None else Path(_checked(str, root, where, "data.root")),
        partition=_choose(PARTITIONS, tables["partition"], where, "partition"),
        model=_build(ModelChoice, {"source": source, **choice}, where, "model"),
        local=_build(LocalTraining, tables["local"], where, "local"),
        plan=_build(FederationPlan, federation, where, "federation", also=("aggregator",)),
        aggregator=_choose(AGGREGATORS, aggregator, where, "federation.aggregator"),
        defense=_choose(DEFENSES, tables.get("defense", "none"), where, "defense"),
        threat=_build(ThreatModel, tables.get("threat", {}), where, "threat"),
    )


def _model_source(table: dict[str, Any], where: str) -> ModelSource:
    kind = table.get("kind")
    if isinstance(kind, str) and ":" in kind:
        rest = {key: value for key, value in table.items() if key != "kind"}
        return typing.cast("ModelSource", _build(UserModel, {"target": kind, **rest}, where, "model"))
    return typing.cast("ModelSource", _choose(MODELS, table, where, "model", also=("init", "mode")))


def _choose(choices: Mapping[str, Any], value: Any, where: str, table: str, also: Sequence[str] = ()) -> Any:
    """An instance of the class that `kind` names; a bare string is a kind with its defaults."""
    settings = {"kind": value} if isinstance(value, str) else dict(value)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: [{table}] needs kind; {suggestion('', choices)}")
    if kind not in choices:
        raise ConfigError(f"{where}: [{table}] unknown kind {kind!r}; {suggestion(kind, choices)}")
    return _build(choices[kind], settings, where, table, also=("kind", *also))


def _build(cls: type, settings: Mapping[str, Any], where: str, table: str, also: Sequence[str] = ()) -> Any:
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
    if key in _NESTED and isinstance(value, list):
        return tuple(_choose(_NESTED[key], item, where, f"{table}.{key}") for item in value)
    if key in _NESTED:
        return _choose(_NESTED[key], value, where, f"{table}.{key}")
    return _checked(hint, value, where, f"{table}.{key}")


def _checked(hint: Any, value: Any, where: str, name: str) -> Any:
    try:
        return pydantic.TypeAdapter(hint).validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{where}: {name}: {first['msg'].lower()}, got {value!r}") from error


def kind_of(value: Any) -> str | None:
    """The catalogue key of an instance."""
    for entries in CATALOGUE.values():
        for kind, cls in entries.items():
            if cls is type(value):
                return kind
    return None


def _plain(value: Any) -> Any:
    """Settings as TOML can say them; None is left out."""
    if isinstance(value, UserModel):
        return {"kind": value.target}
    if is_dataclass(value):
        kind = kind_of(value)
        items = {field.name: getattr(value, field.name) for field in fields(value)}
        plain = {name: _plain(item) for name, item in items.items() if item is not None}
        return {"kind": kind, **plain} if kind else plain
    if isinstance(value, frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
