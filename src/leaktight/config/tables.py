"""The tables of a configuration as plain values: reading, merging, overriding. Imports nothing slow.

Missing settings come from the built-in scenario. A table with another `kind` than the scenario's has that kind's own
defaults; so has `[threat]` with another `preset`. `[defense]` and `[attack]` may also be lists of tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from leaktight.config.fields import check_tables
from leaktight.core.errors import ConfigError, suggestion

Table: TypeAlias = Mapping[str, object]
"""Settings by name: plain values, tables, lists of them, or objects of a Python caller."""

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
"""The built-in scenario. Its data are part of the package."""

OWN_SCENARIO = """
[partition]
kind = "iid"
clients = 20
[model]
kind = "lenet_zhu"
init = "wide"
activation = "sigmoid"
[local]
learning_rate = 0.2
[federation]
rounds = 20
[threat]
preset = "diagnostic"
[audit]
trials = 5
adapted = ["csdlg"]
[audit.local]
epochs = 1
samples = 1
batch_size = 1
"""
"""The scenario of an audit of a caller's own model or data: one example, one step, labels known, weights that leak.

No real update is easier to attack, so this is an upper bound.
"""

AUDIT_SCENARIO = (
    OWN_SCENARIO
    + """
[[attack]]
kind = "csdlg"
iterations = 8
[[attack]]
kind = "dlg"
iterations = 15
restarts = 1
[[attack]]
kind = "inverting_gradients"
iterations = 400
learning_rate = 0.1
"""
)
"""The scenario of an audit without a config, with attacks that are fast on the built-in data and network."""

LISTS = ("defense", "attack")
"""Tables that may be lists of tables."""

VALUES = ("seed", "secret_seed")
"""Settings outside of tables."""

TABLES = ("data", "partition", "model", "local", "federation", "threat", "guard", "consent", "audit")


def read_tables(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    given: Table | None = None,
    named: Mapping[str, Sequence[object]] | None = None,
    scenario: str = "",
) -> tuple[Table, str]:
    """The tables of a config, and its name in errors.

    path: a TOML file; None for the built-in scenario with `scenario` on top. given: tables and objects of a Python
    caller, on top of that. named: by table, kinds or objects instead of the config's; a kind that the config has keeps
    its settings. overrides: "table.key=value", applied last.
    """
    where = str(path) if path else "built-in scenario"
    tables = merged(tomllib.loads(SCENARIO), _read(path) if path is not None else tomllib.loads(scenario))
    tables = overridden(merged(tables, given or {}), overrides, named or {})
    known = (*VALUES, *TABLES, *LISTS)
    for name in tables:
        if name not in known:
            raise ConfigError(f"{where}: unknown table {name!r}; {suggestion(name, known)}")
        if name in TABLES and isinstance(tables[name], str | int | float | list):
            raise ConfigError(f"{where}: expected a table [{name}], got {tables[name]!r}")
    check_tables(tables, where)
    return tables, where


def overridden(tables: Table, overrides: Sequence[str], named: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """The tables with the `named` kinds instead of their own, then with the overrides "table.key=value"."""
    result = dict(tables)
    for table, kinds in named.items():
        if kinds:
            result[table] = _named(kinds, as_list(tables.get(table, [])))
    for override in overrides:
        result = merged(result, _parse_override(override))
    return result


def as_list(value: object) -> list[object]:
    """The value as a list; a single value becomes a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _read(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def merged(base: Table, other: Table) -> dict[str, object]:
    """`base` updated with `other`, key by key; a table of another kind or preset replaces the whole table."""
    result = dict(base)
    for key, value in other.items():
        before = base.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and _same_kind(before, value):
            result[key] = merged(before, value)
        elif isinstance(value, Mapping) and isinstance(before, list) and all(place.isdigit() for place in value):
            numbered = {str(place): item for place, item in enumerate(before)}
            result[key] = list(merged(numbered, value).values())
        else:
            result[key] = value
    return result


def _named(methods: Sequence[object], tables: Sequence[object]) -> object:
    """A table for each kind: the first one of this kind in `tables`, or a new one. Objects and tables are kept.

    A single method is returned without a list.
    """
    found = {table["kind"]: table for table in reversed(tables) if isinstance(table, Mapping) and "kind" in table}
    chosen = [found.get(each, {"kind": each}) if isinstance(each, str) else each for each in methods]
    return chosen[0] if len(chosen) == 1 else chosen


def _same_kind(before: Table, value: Table) -> bool:
    return all(value.get(key, before.get(key)) == before.get(key) for key in ("kind", "preset"))


def _parse_override(text: str) -> Table:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"expected --set table.key=value, got {text!r}")
    parsed: object = value
    with suppress(tomllib.TOMLDecodeError):
        parsed = tomllib.loads(f"value = {value}")["value"]
    first, *keys = path.strip().split(".")
    for key in reversed(keys):
        parsed = {key: parsed}
    return {first: parsed}
