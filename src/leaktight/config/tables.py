"""The tables of a configuration as plain values: reading, merging, overriding. Imports nothing slow.

Missing settings come from the built-in scenario. A table with another `kind` than the scenario's has that kind's own
defaults; so has `[threat]` with another `preset`. The scenario's settings of attacks hold for its own data and network
only. `[defense]` and `[attack]` may also be lists of tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from leaktight.config.fields import check_tables
from leaktight.config.recipes import PREFIX, config_file
from leaktight.core.errors import ConfigError, suggestion
from leaktight.core.reading import MOST_PARTS, MOST_TEXT, NotTomlError, parse_toml, read_toml
from leaktight.core.text import as_written, printable

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

AUDIT_SCENARIO = """
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
adapted = ["auto", "csdlg"]
[audit.local]
epochs = 1
samples = 1
batch_size = 1
[production.model]
init = "default"
activation = "relu"
[production.local]
samples = 32
learning_rate = 0.05
schedule = {kind = "constant"}
[production.federation]
rounds = 13
[production.defense]
kind = "none"
[[attack]]
kind = "auto"
budget = "quick"
[production.attack]
kind = "agic"
iterations = 240
learning_rate = 0.1
onednn = true
"""
"""The scenario of an audit without a config: one example, one step, labels known, weights that leak.

No real update is easier to attack, so this is an upper bound. Its production track attacks several epochs of ordinary
training after a few rounds. The settings of its attacks are for the built-in data and network; see `FITTED`.
"""

FITTED = ("data", "model", "attack")
"""The tables that the settings of the built-in attacks are made for: whoever names one has attacks at their own
strength, in both tracks."""

LISTS = ("defense", "attack")
"""Tables that may be lists of tables."""

VALUES = ("seed", "secret_seed", "device")
"""Settings outside of tables."""

TABLES = ("data", "partition", "model", "local", "federation", "threat", "guard", "consent", "audit")

_DIAGNOSTIC = ("local", "attack_round", "every", "watched", "watched_examples")
"""Keys of `[audit]` that do not hold for the production track."""

RECIPE = "recipe"
"""The table of a recipe that says what it reproduces; of it, a config reads only `like`, the recipe that it extends."""

PRODUCTION = "production"
"""The table of tables that replace those of the config in a second experiment, the production track of an audit."""


def read_tables(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    given: Table | None = None,
    named: Mapping[str, Sequence[object]] | None = None,
    scenario: str = "",
) -> tuple[Table, str]:
    """The tables of a config, and its name in errors.

    path: a TOML file or `recipe:NAME`; None for the built-in scenario with `scenario` on top. given: tables and objects
    of a Python caller, on top of that. named: by table, kinds or objects instead of the config's; a kind that the
    config has keeps its settings. overrides: "table.key=value", applied last.
    """
    where = str(path) if path else "built-in scenario"
    tables = merged(tomllib.loads(SCENARIO), _read(path) if path is not None else tomllib.loads(scenario))
    tables = merged(tables, given or {})
    if path is None:
        tables = _yielding(tables, [given or {}, *map(_parse_override, overrides)], named or {})
    tables = overridden(tables, overrides, named or {})
    _check(tables, (*VALUES, *TABLES, *LISTS, PRODUCTION), where)
    if (production := production_tables(tables, where)) is not None:
        _check(production, (*VALUES, *TABLES, *LISTS), production_name(where))
    return tables, where


def production_name(where: str) -> str:
    """The name in errors of the production track of a config."""
    return f"{where}, [{PRODUCTION}]"


def production_tables(tables: Table, where: str) -> Table | None:
    """The tables of the production track: those of `[production]` over the config's own; None without that table.

    The easier updates and the attacked and watched rounds of `[audit]` do not count there.
    """
    own = tables.get(PRODUCTION)
    if own is None:
        return None
    known = (*TABLES, *LISTS)
    if not isinstance(own, Mapping):
        raise ConfigError(f"{where}: expected a table [{PRODUCTION}], got {as_written(own)}")
    for name in own:
        if name not in known:
            raise ConfigError(f"{where}: [{PRODUCTION}] unknown table {name!r}; {suggestion(str(name), known)}")
    base = {name: value for name, value in tables.items() if name != PRODUCTION}
    audit = base.get("audit")
    if isinstance(audit, Mapping):
        base["audit"] = {key: value for key, value in audit.items() if key not in _DIAGNOSTIC}
    return merged(base, own)


def _check(tables: Table, known: Sequence[str], where: str) -> None:
    for name in tables:
        if name not in known:
            raise ConfigError(f"{where}: unknown table {name!r}; {suggestion(name, known)}")
        if name in TABLES and isinstance(tables[name], str | int | float | list):
            raise ConfigError(f"{where}: expected a table [{name}], got {as_written(tables[name])}")
    check_tables(tables, where)


def _yielding(tables: Table, said: Sequence[Table], named: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """The built-in tables without what would contradict the caller: settings of attacks, and of the production track.

    said: tables of the caller, which hold for both tracks. Whoever names attacks wants these alone.
    """
    if named.get("attack") or any(_fits_another(each) for each in said):
        tables = _at_own_strength(tables)
    production = tables.get(PRODUCTION)
    if not isinstance(production, Mapping):
        return dict(tables)
    if named.get("attack") or any(_replaces(each.get("attack")) for each in said):
        return {name: value for name, value in tables.items() if name != PRODUCTION}
    kept = dict(production)
    for name, value in ((name, value) for each in said for name, value in each.items() if name not in LISTS):
        before = kept.pop(name, None)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and "kind" not in value:
            kept[name] = {key: item for key, item in before.items() if key not in value}
    return {**tables, PRODUCTION: kept}


def _fits_another(said: Table) -> bool:
    """Whether the tables of a caller name data, a network or an attack, in either track. Where data lie names none."""
    data, inner = said.get("data"), said.get(PRODUCTION)
    named = said.keys() & set(FITTED)
    if isinstance(data, Mapping) and data.keys() == {"root"}:
        named -= {"data"}
    return bool(named) or (isinstance(inner, Mapping) and _fits_another(inner))


def _at_own_strength(tables: Table) -> dict[str, object]:
    """The built-in tables with attacks of the same kinds without settings, in both tracks."""
    result = dict(tables)
    if isinstance(attacks := tables.get("attack"), list):
        result["attack"] = [{"kind": each["kind"]} for each in attacks]
    elif isinstance(attacks, Mapping):
        result["attack"] = {"kind": attacks["kind"]}
    if isinstance(production := tables.get(PRODUCTION), Mapping):
        result[PRODUCTION] = _at_own_strength(production)
    return result


def _replaces(value: object) -> bool:
    """Whether an override replaces a list of tables, not a setting of one of them."""
    return value is not None and not (isinstance(value, Mapping) and "kind" not in value)


def overridden(tables: Table, overrides: Sequence[str], named: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """The tables with the `named` kinds instead of their own, then with the overrides "table.key=value"."""
    result = dict(tables)
    for table, kinds in named.items():
        if kinds:
            result[table] = _named(kinds, as_list(tables.get(table, [])))
    for override in overrides:
        result = merged(result, _placed(result, _parse_override(override), override))
    return result


def _placed(tables: Table, override: Table, text: str) -> Table:
    """The override with the place of the table in its list, where it names a kind or there is only one."""
    (name, value), *_ = override.items()
    listed = tables.get(name)
    if name not in LISTS or not isinstance(value, Mapping) or "kind" in value:
        return override
    (key, inside), *_ = value.items()
    if isinstance(listed, Mapping) and isinstance(inside, Mapping) and listed.get("kind") == key:
        return {name: inside}
    if not isinstance(listed, list) or key.isdigit():
        return override
    kinds = [each.get("kind") if isinstance(each, Mapping) else None for each in listed]
    if isinstance(inside, Mapping) and kinds.count(key) == 1:
        return {name: {str(kinds.index(key)): inside}}
    if len(listed) == 1:
        return {name: {"0": value}}
    rest = text.partition(".")[2]
    raise ConfigError(
        f"--set {text}: there are {len(listed)} tables [[{name}]]; say which: "
        + " or ".join(f"{name}.{place}.{rest} ({kind or 'your own'})" for place, kind in enumerate(kinds))
    )


def as_list(value: object) -> list[object]:
    """The value as a list; a single value becomes a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _read(path: Path) -> Table:
    if path.is_dir():
        raise ConfigError(
            f"expected a config in TOML, got the folder {path}; for images in it: --set data.kind=image_folder "
            f"--set data.path={path}"
        )
    tables = dict(read_toml(config_file(path), ConfigError))
    recipe = tables.pop(RECIPE, {})
    like = recipe.get("like") if isinstance(recipe, Mapping) else None
    return merged(_read(Path(f"{PREFIX}{like}")), tables) if like else tables


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
    first, *keys = path.strip().split(".")
    if len(text) > MOST_TEXT or len(keys) >= MOST_PARTS or not text.isprintable():
        raise ConfigError(
            f"expected --set table.key=value in one printable line, got {printable(text, 60)!r}; shorten it"
        )
    parsed: object = value
    with suppress(NotTomlError):
        parsed = parse_toml(f"value = {value}", f"--set {printable(path)}", NotTomlError)["value"]
    for key in reversed(keys):
        parsed = {key: parsed}
    return {first: parsed}
