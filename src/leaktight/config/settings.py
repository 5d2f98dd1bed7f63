"""Configuration: TOML to frozen, validated settings, and back to TOML for the record.

An unknown key is an error that names the file, the table, the key and the nearest valid key. What a config leaves out
comes from the built-in scenario. A table with another `kind` than the scenario's starts from that kind's own defaults.
`[defense]` and `[attack]` may also be lists of tables; a setting whose type is a family of the catalogue (`schedule`,
`parts`, `labels`) is a table with a `kind`, or a list of them.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w

from leaktight.audit.settings import AuditSettings
from leaktight.config.catalogue import AGGREGATORS, ATTACKS, DATASETS, DEFENSES, PARTITIONS
from leaktight.config.toml import as_list, build, checked, choose, choose_all, kind_of, one_or_all, plain, settings_of
from leaktight.core.errors import ConfigError, suggestion
from leaktight.core.protocols import Aggregator, Attack, Defense
from leaktight.core.rng import parse_key
from leaktight.core.threat import ThreatModel
from leaktight.core.training import LocalTraining
from leaktight.data.dataset import DatasetSource
from leaktight.data.partition import Scheme
from leaktight.defenses.stack import Stack
from leaktight.fl.consent import Consent
from leaktight.fl.plan import FederationPlan
from leaktight.guard import BroadcastGuard
from leaktight.models import MODELS
from leaktight.models.source import ModelSource
from leaktight.models.user import UserModel

__all__ = [
    "SCENARIO",
    "Config",
    "ModelChoice",
    "kind_of",
    "load_config",
    "model_source",
    "overridden",
    "settings_of",
]

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

_LISTS = ("defense", "attack")
"""The tables of which there may be several."""


@dataclass(frozen=True)
class ModelChoice:
    """A network with where its weights come from ("default", "wide" or a file) and the mode in which clients run it."""

    source: ModelSource
    init: str = "default"
    mode: Literal["train", "eval"] = "train"


@dataclass(frozen=True)
class Config:
    """The resolved configuration of a run.

    defenses: as they were named, at least one. Training puts several on top of each other, in that order; a comparison
    takes them one by one. attacks: those to run, if any are named. audit: None where the config does not speak of it.
    attacked: the local training behind attacked updates, where it is not `local`; `[audit.local]` in a config.
    key: the secret root of an experiment that is to be replayed, `secret_seed` in a config; None: a fresh one. It is
    not part of the record: the run's folder keeps it, for its owner alone.
    guard: what clients look at a model with before they train on it; None without a table `[guard]`.
    consent: what clients insist on beyond the plan; a table `[consent]`.
    """

    seed: int
    data: DatasetSource
    data_root: Path | None
    partition: Scheme
    model: ModelChoice
    local: LocalTraining
    plan: FederationPlan
    aggregator: Aggregator
    defenses: tuple[Defense, ...]
    threat: ThreatModel
    attacks: tuple[Attack, ...] = ()
    audit: AuditSettings | None = None
    attacked: LocalTraining | None = None
    guard: BroadcastGuard | None = None
    consent: Consent = Consent()
    key: bytes | None = field(default=None, repr=False)

    @property
    def defense(self) -> Defense:
        """The one defense of a training run: the only one named, or all of them stacked in order."""
        return self.defenses[0] if len(self.defenses) == 1 else Stack(parts=self.defenses)

    def to_toml(self) -> str:
        """The whole configuration, defaults included, as TOML that gives this configuration again."""
        tables = {
            "seed": self.seed,
            "data": {**plain(self.data), **({"root": str(self.data_root)} if self.data_root else {})},
            "partition": plain(self.partition),
            "model": {**plain(self.model.source), "init": self.model.init, "mode": self.model.mode},
            "local": plain(self.local),
            "federation": {**plain(self.plan), "aggregator": plain(self.aggregator)},
            "defense": one_or_all(self.defenses),
            "threat": plain(self.threat),
            **({"attack": one_or_all(self.attacks)} if self.attacks else {}),
            **({"guard": plain(self.guard)} if self.guard else {}),
            **({"consent": plain(self.consent)} if self.consent != Consent() else {}),
            **({"audit": self._audit()} if self.audit or self.attacked else {}),
        }
        return tomli_w.dumps(tables)

    def _audit(self) -> dict[str, Any]:
        local = {"local": plain(self.attacked)} if self.attacked else {}
        return {**plain(self.audit or AuditSettings()), **local}


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    defenses: Sequence[str] = (),
    attacks: Sequence[str] = (),
    scenario: str = "",
) -> Config:
    """Read a config (or the built-in scenario), apply `table.key=value` overrides, and validate everything.

    defenses, attacks: kinds that take the place of the config's; one that the config holds keeps its settings.
    scenario: TOML that is laid over the built-in scenario where no config is named.
    """
    where = str(path) if path else "built-in scenario"
    tables = _merged(tomllib.loads(SCENARIO), _read(path) if path is not None else tomllib.loads(scenario))
    return _resolve(overridden(tables, overrides, {"defense": defenses, "attack": attacks}), where)


def overridden(
    tables: Mapping[str, Any], overrides: Sequence[str], named: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Tables with the kinds that a command named instead of theirs, by table, and then with `table.key=value`."""
    result = dict(tables)
    for table, kinds in named.items():
        if kinds:
            result[table] = _named(kinds, as_list(tables.get(table, [])))
    for override in overrides:
        result = _merged(result, _parse_override(override))
    return result


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
        elif isinstance(value, Mapping) and isinstance(before, list) and all(place.isdigit() for place in value):
            numbered = {str(place): item for place, item in enumerate(before)}
            result[key] = list(_merged(numbered, value).values())
        else:
            result[key] = value
    return result


def _named(kinds: Sequence[str], tables: Sequence[Any]) -> Any:
    """A table for each kind: the first that there is of it, or one with the kind alone. A single one is no list."""
    found = {table["kind"]: table for table in reversed(tables) if isinstance(table, Mapping) and "kind" in table}
    chosen = [found.get(kind, {"kind": kind}) for kind in kinds]
    return chosen[0] if len(chosen) == 1 else chosen


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
    known = {
        "seed",
        "secret_seed",
        "data",
        "partition",
        "model",
        "local",
        "federation",
        "threat",
        "guard",
        "consent",
        "audit",
        *_LISTS,
    }
    for name in tables:
        if name not in known:
            raise ConfigError(f"{where}: unknown table {name!r}; {suggestion(name, known)}")
        if name not in ("seed", "secret_seed", *_LISTS) and not isinstance(tables[name], Mapping):
            raise ConfigError(f"{where}: expected a table [{name}], got {tables[name]!r}")
    data, model, federation, audit = ({**tables.get(name, {})} for name in ("data", "model", "federation", "audit"))
    attacked = audit.pop("local", None)
    root = data.pop("root", None)
    choice = {key: model.pop(key) for key in ("init", "mode") if key in model}
    aggregator = federation.pop("aggregator", "fedavg")
    source = model_source(model, where)
    return Config(
        seed=checked(int, tables["seed"], where, "seed"),
        data=choose(DATASETS, data, where, "data", also=("root",)),
        data_root=None if root is None else Path(checked(str, root, where, "data.root")),
        partition=choose(PARTITIONS, tables["partition"], where, "partition"),
        model=build(ModelChoice, {"source": source, **choice}, where, "model"),
        local=build(LocalTraining, tables["local"], where, "local"),
        plan=build(FederationPlan, federation, where, "federation", also=("aggregator",)),
        aggregator=choose(AGGREGATORS, aggregator, where, "federation.aggregator"),
        defenses=choose_all(DEFENSES, tables.get("defense", "none"), where, "defense"),
        threat=build(ThreatModel, tables.get("threat", {}), where, "threat"),
        attacks=choose_all(ATTACKS, tables["attack"], where, "attack") if "attack" in tables else (),
        audit=build(AuditSettings, audit, where, "audit", also=("local",)) if "audit" in tables else None,
        attacked=None if attacked is None else _attacked(tables["local"], attacked, where),
        guard=build(BroadcastGuard, tables["guard"], where, "guard") if "guard" in tables else None,
        consent=build(Consent, tables.get("consent", {}), where, "consent"),
        key=_key(tables["secret_seed"], where) if "secret_seed" in tables else None,
    )


def _key(text: Any, where: str) -> bytes:
    """A key from its digits, or from the file named after an "@"; no error repeats it."""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: secret_seed: expected text, 64 hexadecimal digits or @FILE, got another type")
    try:
        return parse_key(Path(text[1:]).read_text().strip() if text.startswith("@") else text)
    except OSError as error:
        raise ConfigError(f"{where}: secret_seed: cannot read {text[1:]}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: secret_seed: {error}; copy it from secret.key of the run to replay") from error


def _attacked(local: Mapping[str, Any], changes: Any, where: str) -> LocalTraining:
    """`[local]` with the changes of `[audit.local]`."""
    if not isinstance(changes, Mapping):
        raise ConfigError(f"{where}: expected a table [audit.local], got {changes!r}")
    settings: LocalTraining = build(LocalTraining, {**local, **changes}, where, "audit.local")
    return settings


def model_source(table: Mapping[str, Any], where: str) -> ModelSource:
    """The network of a [model] table: of the catalogue, or the user's own by `module:function`."""
    kind = table.get("kind")
    if isinstance(kind, str) and ":" in kind:
        rest = {key: value for key, value in table.items() if key != "kind"}
        return typing.cast("ModelSource", build(UserModel, {"target": kind, **rest}, where, "model"))
    return typing.cast("ModelSource", choose(MODELS, table, where, "model", also=("init", "mode")))
