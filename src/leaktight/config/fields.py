"""The settings of every table and method, known without importing any: `fields.json`, and the check of tables by it.

So a misspelt key, a value of another type or out of range is an error within a fraction of a second. Whether settings
fit each other is checked when the methods are built.
`python -m leaktight.config.fields` writes the file again; a test compares it with the methods.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from leaktight.config.names import ENTRIES
from leaktight.core.errors import ConfigError, suggestion
from leaktight.core.own import is_own
from leaktight.core.scope import not_supported
from leaktight.core.text import as_written

FAMILIES = {
    "data": "datasets",
    "partition": "partitions",
    "model": "models",
    "defense": "defenses",
    "attack": "attacks",
    "federation.aggregator": "aggregators",
}
"""By table, the family that its `kind` names."""

NAMES = {"audit.metrics": "metrics", "audit.adapted": "attacks", "threat.preset": "threats"}
"""By setting, the family whose names it has or lists."""

ALSO = {
    "data": ("root",),
    "model": ("init", "mode"),
    "federation": ("aggregator",),
    "threat": ("preset",),
    "audit": ("local",),
}
"""Keys of a table beside the settings of its method or class."""

_WEIGHTS = (".pt", ".pth", ".th", ".ckpt", ".safetensors", ".onnx", ".npz", ".h5", ".keras")
_TASKS = ("task", "loss", "criterion", "loss_function", "loss_fn")
"""What a user may look for to set the task of a model."""

Field = Mapping[str, Any]
"""What a setting may be: a fragment of JSON schema, or {"family": ...} for a method or a list of methods."""


@cache
def known_fields() -> Mapping[str, Mapping[str, Mapping[str, Field]]]:
    """Fields by name, by family and kind; the family "tables" has the tables without kinds."""
    text = resources.files("leaktight.config").joinpath("fields.json").read_text()
    read: Mapping[str, Mapping[str, Mapping[str, Field]]] = json.loads(text)
    return read


def check_tables(tables: Mapping[str, object], where: str) -> None:
    """Raise ConfigError for what is wrong in a config and can be told without building it."""
    for name, value in tables.items():
        if name in FAMILIES:
            for each in value if isinstance(value, list) else [value]:
                _check_method(FAMILIES[name], each, where, name)
        elif name in known_fields()["tables"] and isinstance(value, Mapping):
            _check_fields(known_fields()["tables"][name], value, where, name)
            for key in ALSO.get(name, ()):
                if f"{name}.{key}" in FAMILIES and key in value:
                    _check_method(FAMILIES[f"{name}.{key}"], value[key], where, f"{name}.{key}")


def _check_method(family: str, value: object, where: str, table: str) -> None:
    settings = {"kind": value} if isinstance(value, str) else value
    if not isinstance(settings, Mapping):
        return
    kind = require_kind(family, settings, where, table)
    if not is_own(kind):
        rest = {key: item for key, item in settings.items() if key != "kind"}
        _check_fields(known_fields()[family][kind], rest, where, table, "kind")


def require_kind(family: str, settings: Mapping[str, object], where: str, table: str) -> str:
    """The `kind` of a table: of the catalogue, or the user's own; ConfigError if there is none or it is unknown."""
    kind = settings.get("kind")
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: [{table}] needs kind; {suggestion('', ENTRIES[family])}")
    if kind not in ENTRIES[family] and not is_own(kind):
        if family == "models" and kind.lower().endswith(_WEIGHTS):
            raise ConfigError(
                f"{where}: [{table}] expected a network by its name or as module:function, got the file {kind!r}; name "
                "the network, and give the file as model.init (inspect: as --before)"
            )
        raise ConfigError(f"{where}: [{table}] unknown kind {kind!r}; {suggestion(kind, ENTRIES[family])}")
    return kind


def require_keys(
    settings: Iterable[str], names: Collection[str], where: str, table: str, also: Collection[str] = ()
) -> None:
    """Raise ConfigError unless all keys of a table are among `names`. also: keys to suggest, read elsewhere."""
    for key in settings:
        if key not in names and key in _TASKS:
            raise ConfigError(
                f"{where}: [{table}] {not_supported(f'another {key}')}; the loss is the cross-entropy (words: CTC), so "
                f"leave {key} out"
            )
        if key not in names:
            raise ConfigError(f"{where}: [{table}] unknown key {key!r}; {suggestion(key, {*names, *also})}")


def _check_fields(
    fields: Mapping[str, Field], settings: Mapping[str, object], where: str, table: str, *more: str
) -> None:
    require_keys(settings, {*fields, *ALSO.get(table, ()), *more}, where, table)
    for key, value in settings.items():
        field = fields.get(key, {})
        if "family" in field:
            for each in value if isinstance(value, list) else [value]:
                _check_method(field["family"], each, where, f"{table}.{key}")
        elif not _accepts(field, value):
            raise ConfigError(f"{where}: {table}.{key}: expected {words(field)}, got {as_written(value)}")
        elif f"{table}.{key}" in NAMES and isinstance(value, str | list):
            listed = [value] if isinstance(value, str) else value
            require_names(NAMES[f"{table}.{key}"], listed, f"{where}: {table}.{key}")
        elif (bound := _broken_bound(field, value)) is not None:
            raise ConfigError(f"{where}: [{table}] expected {key} {bound}, got {value}")


def require_names(family: str, names: Iterable[str], setting: str) -> None:
    """Raise ConfigError unless all names that a setting lists are of the catalogue, or the user's own."""
    for name in names:
        if name not in ENTRIES[family] and not is_own(name):
            raise ConfigError(f"{setting}: unknown {family[:-1]} {name!r}; {suggestion(name, ENTRIES[family])}")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: object) -> bool:
    return _number(value) and (value.is_integer() if isinstance(value, float) else True)


def _reads_as(kind: Callable[[str], object]) -> Callable[[object], bool]:
    def reads(value: object) -> bool:
        with suppress(ValueError):
            return isinstance(value, str) and kind(value) is not None
        return False

    return reads


_TYPES: Mapping[str, Callable[[object], bool]] = {
    "integer": lambda value: _whole(value) or _reads_as(int)(value),
    "number": lambda value: _number(value) or _reads_as(float)(value),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool | str) or value in (0, 1),
    "array": lambda value: isinstance(value, list | tuple | set | frozenset),
    "object": lambda value: isinstance(value, Mapping),
    "null": lambda value: value is None,
}


def _accepts(field: Field, value: object) -> bool:
    """Whether a value may be of the field's type; what is no plain value is left to the methods."""
    if not isinstance(value, str | int | float | list):
        return True
    if "anyOf" in field:
        return any(_accepts(each, value) for each in field["anyOf"])
    if "enum" in field:
        return value in field["enum"]
    if "const" in field:
        return bool(value == field["const"])
    if "type" in field and not _TYPES[field["type"]](value):
        return False
    return not isinstance(value, list) or all(_accepts(field.get("items", {}), each) for each in value)


def _broken_bound(field: Field, value: object) -> str | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    checks = {
        "minimum": (">=", value < field.get("minimum", value)),
        "exclusiveMinimum": (">", "exclusiveMinimum" in field and value <= field["exclusiveMinimum"]),
    }
    return next((f"{sign} {field[name]}" for name, (sign, broken) in checks.items() if broken), None)


def words(field: Field) -> str:
    """The type of a field in words.

    >>> words({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "items": {"type": "integer"}}]})
    'an integer or a list'
    >>> words({"type": "array", "items": {"enum": ["labels", "buffers"]}})
    "a list of 'labels' or 'buffers'"
    """
    if "anyOf" in field:
        return " or ".join(words(each) for each in field["anyOf"] if each.get("type") != "null")
    if "enum" in field:
        first, last = map(as_written, field["enum"][:-1]), as_written(field["enum"][-1])
        return " or ".join(filter(None, (", ".join(first), last)))
    if "enum" in field.get("items", {}):
        return f"a list of {words(field['items'])}"
    named = {"integer": "an integer", "number": "a number", "string": "text", "boolean": "true or false"}
    return repr(field["const"]) if "const" in field else named.get(field.get("type", ""), "a list")


def describe() -> dict[str, dict[str, dict[str, Field]]]:
    """What `fields.json` has to say, from the methods themselves."""
    from leaktight.audits.settings import AuditSettings
    from leaktight.config.catalogue import CATALOGUE
    from leaktight.core.threat import ThreatModel
    from leaktight.core.training import LocalTraining
    from leaktight.fl.consent import Consent
    from leaktight.fl.plan import FederationPlan
    from leaktight.guard import BroadcastGuard

    tables = {
        "local": LocalTraining,
        "federation": FederationPlan,
        "threat": ThreatModel,
        "guard": BroadcastGuard,
        "consent": Consent,
        "audit": AuditSettings,
    }
    families = {kind: dict(family) for kind, family in CATALOGUE.items()}
    every: Mapping[str, Mapping[str, type]] = {"tables": tables, **families}
    return {family: {name: _fields(cls) for name, cls in classes.items()} for family, classes in every.items()}


def _fields(cls: type) -> dict[str, Field]:
    hints = typing.get_type_hints(cls)
    found = {field.name: _field(hints[field.name]) for field in dataclasses.fields(cls)}
    return {name: {**field, **_bounds(cls, name, field)} for name, field in found.items()}


def _field(hint: Any) -> Field:
    import pydantic

    from leaktight.config.toml import family_of

    family, _ = family_of(hint)
    if family is not None:
        return {"family": family.kind}
    try:
        schema = pydantic.TypeAdapter(hint).json_schema()
    except (pydantic.PydanticSchemaGenerationError, pydantic.errors.PydanticInvalidForJsonSchema):
        return {}
    return _inlined(schema, schema.get("$defs", {}))


def _inlined(schema: Field, definitions: Mapping[str, Field]) -> Field:
    """A schema without references, titles and defaults."""
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    kept = {key: schema[key] for key in ("type", "enum", "const") if key in schema}
    if "anyOf" in schema:
        kept["anyOf"] = [_inlined(each, definitions) for each in schema["anyOf"]]
    if isinstance(schema.get("items"), Mapping):
        kept["items"] = _inlined(schema["items"], definitions)
    return kept


def _bounds(cls: type, name: str, field: Field) -> Field:
    """The least value of a number, found by trying: the class refuses what lies below."""
    types = {each.get("type") for each in field.get("anyOf", [field])}
    step = 1 if "integer" in types else 1e-9 if "number" in types else None
    if step is None:
        return {}
    for bound in (0, 1, 2):
        if _refuses(cls, name, bound - step) and not _refuses(cls, name, bound):
            return {"minimum": bound}
        if step < 1 and _refuses(cls, name, bound) and not _refuses(cls, name, bound + step):
            return {"exclusiveMinimum": bound}
    return {}


def _refuses(cls: type, name: str, value: float) -> bool:
    """Whether the class says of this setting alone that it must not have this value."""
    try:
        cls(**{**_needed(cls), name: value})
    except ValueError as error:
        return str(error).startswith(f"expected {name} ")
    except Exception:  # other settings do not fit this value, or it is of another type
        return False
    return False


def _needed(cls: type) -> dict[str, object]:
    """Stand-ins for the settings that have no default."""
    return {
        field.name: "a:b"
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }


def written() -> str:
    """The text of `fields.json`: a line for each table and method."""
    families = []
    for family, classes in describe().items():
        lines = [f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in classes.items()]
        families.append(f" {json.dumps(family)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(families) + "\n}\n"


if __name__ == "__main__":
    Path(__file__).with_name("fields.json").write_text(written())
