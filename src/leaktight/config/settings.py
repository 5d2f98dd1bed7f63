"""The configuration of a run: validated settings from TOML, and back to TOML for the record.

An unknown key is an error that names the file, the table, the key and the nearest valid key. A setting that is itself a
method (`schedule`, `parts`, `labels`) is a table with a `kind`, or a list of such tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import tomli_w
from torch import nn

from leaktight.audits.settings import AuditSettings
from leaktight.config.catalogue import AGGREGATORS, ATTACKS, DATASETS, DEFENSES, MODELS, PARTITIONS
from leaktight.config.tables import Table, production_name, production_tables, read_tables
from leaktight.config.toml import build, checked, choose, choose_all, made, table_of
from leaktight.core.errors import ConfigError, suggestion
from leaktight.core.keys import parse_key
from leaktight.core.own import is_own
from leaktight.core.protocols import Aggregator, Attack, Defense
from leaktight.core.reading import read_limited
from leaktight.core.text import as_written
from leaktight.core.threat import ThreatModel
from leaktight.core.threat_presets import PRESETS
from leaktight.core.training import LocalTraining
from leaktight.data.dataset import DatasetSource
from leaktight.data.partition import Scheme
from leaktight.defenses.stack import Stack
from leaktight.fl.consent import Consent
from leaktight.fl.plan import FederationPlan
from leaktight.guard import BroadcastGuard
from leaktight.models.source import ModelSource
from leaktight.models.user import GivenModel, UserModel

_MOST_KEY = 4096


@dataclass(frozen=True)
class ModelChoice:
    """A network. init: "default", "wide", "kaiming" or a file of weights. mode: in which clients train it."""

    source: ModelSource
    init: str = "default"
    mode: Literal["train", "eval"] = "train"


@dataclass(frozen=True)
class Config:
    """The resolved configuration of a run.

    defenses: at least one; training stacks several in order, an audit tries each. attacks: empty for an audit's
    defaults. audit: None without a table `[audit]`. attacked: the local training of attacked rounds, `[audit.local]`;
    None for `local`. guard: clients' check of a model before they train on it; None without a table `[guard]`.
    consent: conditions of clients beyond the plan, `[consent]`. key: the secret key of an experiment to replay,
    `secret_seed`; None for a random one. It is not part of the TOML record; only the run's folder has it.
    production: the configuration of an audit's production track, `[production]`.
    device: where models, attacks and metrics run: "auto", "cpu", "cuda", "cuda:1" or "mps".
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
    production: Config | None = None
    device: str = "cpu"

    @property
    def defense(self) -> Defense:
        """The defense of a training run: the only one, or all stacked in order."""
        return self.defenses[0] if len(self.defenses) == 1 else Stack(parts=self.defenses)

    def to_toml(self) -> str:
        """The configuration as TOML, defaults included; loading it gives the same configuration."""
        production = {"production": self.production.tables()} if self.production else {}
        device = {} if self.device == "cpu" else {"device": self.device}
        return tomli_w.dumps({"seed": self.seed, **device, **self.tables(), **production})

    def tables(self) -> dict[str, object]:
        """The tables of the configuration as plain values, without those of the production track."""
        return {
            "data": {**table_of(self.data), **({"root": str(self.data_root)} if self.data_root else {})},
            "partition": table_of(self.partition),
            "model": {**table_of(self.model.source), "init": self.model.init, "mode": self.model.mode},
            "local": table_of(self.local),
            "federation": {**table_of(self.plan), "aggregator": table_of(self.aggregator)},
            "defense": _one_or_all(self.defenses),
            "threat": table_of(self.threat),
            **({"attack": _one_or_all(self.attacks)} if self.attacks else {}),
            **({"guard": table_of(self.guard)} if self.guard else {}),
            **({"consent": table_of(self.consent)} if self.consent != Consent() else {}),
            **({"audit": self._audit()} if self.audit or self.attacked else {}),
        }

    def _audit(self) -> dict[str, object]:
        local = {"local": table_of(self.attacked)} if self.attacked else {}
        return {**table_of(self.audit or AuditSettings()), **local}


def _one_or_all(methods: Sequence[object]) -> object:
    """One table, or a list of several."""
    return table_of(methods[0]) if len(methods) == 1 else [table_of(each) for each in methods]


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    given: Table | None = None,
    defenses: Sequence[object] = (),
    attacks: Sequence[object] = (),
    scenario: str = "",
) -> Config:
    """Read a config (or the built-in scenario), apply overrides, and validate everything.

    The arguments are those of `tables.read_tables`. defenses, attacks: kinds or objects instead of the config's.
    """
    named = {"defense": defenses, "attack": attacks}
    tables, where = read_tables(path, overrides, given=given, named=named, scenario=scenario)
    config = _resolve(tables, where)
    production = production_tables(tables, where)
    return config if production is None else replace(config, production=_production(production, where))


def _production(tables: Table, where: str) -> Config:
    """The configuration of a production track; the last round is attacked unless `[production.audit]` names others."""
    config = _resolve(tables, production_name(where))
    audit, said = config.audit or AuditSettings(), tables.get("audit", {})
    if isinstance(said, Mapping) and not {"attack_round", "every"} & said.keys():
        audit = replace(audit, attack_round=max(0, config.plan.rounds - audit.watched))
    return replace(config, audit=audit)


def _resolve(tables: Table, where: str) -> Config:
    data, root = _without(tables["data"], "root")
    model, weights = _without(tables["model"], "init", "mode")
    federation, aggregator = _without(tables.get("federation", {}), "aggregator")
    audit, attacked = _without(tables.get("audit", {}), "local")
    source = model_source(model, where)
    return Config(
        seed=checked(int, tables["seed"], where, "seed"),
        data=choose(DATASETS, data, where, "data", also=("root",)),
        data_root=Path(checked(str, root["root"], where, "data.root")) if root else None,
        partition=choose(PARTITIONS, tables["partition"], where, "partition"),
        model=build(ModelChoice, {**_weights_of(source), **weights, "source": source}, where, "model"),
        local=made(LocalTraining, tables["local"], where, "local"),
        plan=made(FederationPlan, federation, where, "federation", also=("aggregator",)),
        aggregator=choose(AGGREGATORS, aggregator.get("aggregator", "fedavg"), where, "federation.aggregator"),
        defenses=choose_all(DEFENSES, tables.get("defense", "none"), where, "defense"),
        threat=_threat(tables.get("threat", {}), where),
        attacks=choose_all(ATTACKS, tables["attack"], where, "attack") if "attack" in tables else (),
        audit=made(AuditSettings, audit, where, "audit", also=("local",)) if "audit" in tables else None,
        attacked=_attacked(tables["local"], attacked["local"], where) if attacked else None,
        guard=made(BroadcastGuard, tables["guard"], where, "guard") if "guard" in tables else None,
        consent=made(Consent, tables.get("consent", {}), where, "consent"),
        key=_key(tables["secret_seed"], where) if "secret_seed" in tables else None,
        device=checked(str, tables.get("device", "cpu"), where, "device"),
    )


def _without(table: object, *keys: str) -> tuple[object, Table]:
    """A table without these keys, and a table of these keys; an object instead of a table has none."""
    if not isinstance(table, Mapping):
        return table, {}
    rest = {key: value for key, value in table.items() if key not in keys}
    return rest, {key: table[key] for key in keys if key in table}


def _weights_of(source: ModelSource) -> Table:
    """The default `init` of a network: a user's module keeps its own weights."""
    return {"init": "given"} if isinstance(source, GivenModel) else {}


def _key_file(path: Path) -> str:
    return read_limited(path, _MOST_KEY, ConfigError).decode("ascii", "replace").strip()


def _key(text: object, where: str) -> bytes:
    """A key from its digits or from the file @FILE. Errors never contain it."""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: secret_seed: expected text, 64 hexadecimal digits or @FILE, got another type")
    try:
        return parse_key(_key_file(Path(text[1:])) if text.startswith("@") else text)
    except ConfigError as error:
        raise ConfigError(f"{where}: secret_seed: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: secret_seed: {error}; copy it from secret.key of the run to replay") from error


def _threat(table: object, where: str) -> ThreatModel:
    """The threat model of a `[threat]` table: its keys, on top of its preset."""
    rest, chosen = _without(table, "preset")
    if chosen and isinstance(rest, Mapping):
        name = checked(str, chosen["preset"], where, "threat.preset")
        if name not in PRESETS:
            raise ConfigError(f"{where}: threat.preset: unknown threat {name!r}; {suggestion(name, PRESETS)}")
        rest = {**table_of(ThreatModel.preset(name)), **rest}
    return made(ThreatModel, rest, where, "threat", also=("preset",))


def _attacked(local: object, changes: object, where: str) -> LocalTraining:
    """`[local]` with the changes of `[audit.local]`."""
    if isinstance(changes, LocalTraining):
        return changes
    if not isinstance(changes, Mapping):
        raise ConfigError(f"{where}: expected a table [audit.local], got {as_written(changes)}")
    base = local if isinstance(local, Mapping) else table_of(local)
    return build(LocalTraining, {**base, **changes}, where, "audit.local")


def model_source(table: object, where: str) -> ModelSource:
    """The network of a [model] table: of the catalogue, a user's module, or "package.module:function"."""
    if isinstance(table, nn.Module):
        return GivenModel(table)
    kind = table.get("kind") if isinstance(table, Mapping) else table
    if isinstance(table, Mapping) and isinstance(kind, str) and is_own(kind):
        rest = {key: value for key, value in table.items() if key != "kind"}
        return build(UserModel, {"target": kind, **rest}, where, "model")
    return choose(MODELS, table, where, "model", also=("init", "mode"))
