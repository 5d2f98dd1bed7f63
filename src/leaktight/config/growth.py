"""Which settings of a run may change when it is resumed: those that add to it and leave what is finished as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from leaktight.audits.settings import AuditSettings
from leaktight.config.catalogue import SCHEDULES, Family
from leaktight.config.tables import as_list
from leaktight.config.toml import build, choose, table_of
from leaktight.results.differences import Change, Table, changes, refusal

T = TypeVar("T")
Rule = Callable[[Change, Table, Table], str | None]
"""Why a change is refused, given the tables before and after; None if it only adds to the run."""

MEANING = "it changes what is finished"
SHRINKS = "a run does not shrink"
HERE = "the run's settings"


def check_audit(path: object, before: Table, after: Table) -> list[str]:
    """What an audit or a trade-off grows by between these records; UsageError, naming settings, if it changes."""
    return _checked(path, [*_audit(before, after), *_production(before, after)])


def check_training(path: object, before: Table, after: Table) -> list[str]:
    """What a training run grows by: rounds; UsageError, naming settings, if it changes."""
    return _checked(path, _judged(before, after, _FEDERATION))


def check_inspection(path: object, before: Table, after: Table) -> list[str]:
    """What an inspection grows by: attacks; UsageError, naming settings, if it changes."""
    others = _judged(_without(before, "attack"), _without(after, "attack"), {})
    return _checked(path, [*_methods("attack", before, after), *others])


def joined(family: Family[T], held: object, named: Sequence[T], last: tuple[type, ...] = ()) -> tuple[T, ...]:
    """The methods of a run and those that are named, each once.

    held: tables of the run. One that is missing stays, before new ones, unless a named method differs from it only in
    settings; that is for the checks to refuse. last: types of methods that stay at the end.
    """
    tables = [table_of(each) for each in named]
    there = [table for table in as_list(held) if isinstance(table, Mapping)]
    other = {table.get("kind") for table in tables if table not in there}
    if all(table in tables or table.get("kind") in other for table in there):
        return tuple(named)
    by_table: list[tuple[Table, T]] = list(zip(tables, named, strict=True))
    by_table += [
        (table, choose(family, table, HERE, ""))
        for table in there
        if table not in tables and table.get("kind") not in other
    ]
    methods: list[T] = []
    for group in (False, True):
        own = [(table, each) for table, each in by_table if isinstance(each, last) is group]
        if any(table not in tables for table, _ in own):
            own.sort(key=lambda pair: there.index(pair[0]) if pair[0] in there else len(there))
        methods += [each for _, each in own]
    return tuple(methods)


def _checked(path: object, found: Sequence[Change]) -> list[str]:
    refused = [change for change in found if change.reason]
    if refused:
        raise refusal(path, refused)
    return [change.words for change in found]


def _audit(before: Table, after: Table, inside: str = "") -> list[Change]:
    rest = [_without(each, "attack", "defense", "production") for each in (before, after)]
    return [
        *_judged(rest[0], rest[1], _AUDIT, inside),
        *_methods("defense", before, after, inside),
        *_methods("attack", before, after, inside),
    ]


def _production(before: Table, after: Table) -> list[Change]:
    old, new = _table(before, "production"), _table(after, "production")
    if not old:
        return [Change("production", None, "a track")] if new else []
    return _audit(old, new, "production.") if new else [Change("production", "a track", None, SHRINKS)]


def _judged(before: Table, after: Table, rules: Mapping[str, Rule], inside: str = "") -> list[Change]:
    found = []
    for change in changes(before, after):
        rule = rules.get(change.setting)
        reason = MEANING if rule is None else rule(change, before, after) or ""
        found.append(replace(change, setting=inside + change.setting, reason=reason))
    return found


def _methods(name: str, before: Table, after: Table, inside: str = "") -> Iterator[Change]:
    """The methods that are new, missing, or have other settings."""
    there, here = (as_list(each.get(name, [])) for each in (before, after))
    new = [each for each in here if each not in there]
    changed = {each.get("kind") for each in there if isinstance(each, Mapping) and each not in here}
    for each in new:
        if isinstance(each, Mapping) and each.get("kind") not in changed:
            yield Change(f"{inside}{name}", None, each)
    for old in there:
        if old in here or not isinstance(old, Mapping):
            continue
        kind = old.get("kind", name)
        kin = next((each for each in new if isinstance(each, Mapping) and each.get("kind") == kind), None)
        if kin is None:
            yield Change(f"{inside}{name} {kind}", "tried", "left out", SHRINKS)
        else:
            for change in changes(old, kin, f"{inside}{name}.{kind}."):
                yield replace(change, reason=MEANING)


def _victims(change: Change, before: Table, after: Table) -> str | None:
    old, new = _settings(before).looks[-1], _settings(after).looks[-1]
    return None if new >= old else f"{old} victims there, {new} here: {SHRINKS}; --budget ends it early"


def _metrics(change: Change, before: Table, after: Table) -> str | None:
    old, new = (set(_settings(each).image_metrics) for each in (before, after))
    if old == new:
        return None  # what verdicts need is always computed
    return SHRINKS if new < old else "scores need the guesses themselves; the folder has 8-bit pictures of them"


def _rounds(change: Change, before: Table, after: Table) -> str | None:
    old, new = (_number(_table(each, "federation").get("rounds")) for each in (before, after))
    if new < old:
        return f"{SHRINKS}; --from-round goes back"
    schedule = choose(SCHEDULES, _table(before, "local").get("schedule", "constant"), HERE, "local.schedule")
    if any(schedule.factor(each, old) != schedule.factor(each, new) for each in range(old)):
        kind = table_of(schedule).get("kind", "own")
        return f"with local.schedule {kind} the learning rates of finished rounds depend on it"
    own = _settings(before)
    if own.every is not None and own.rounds(old) == (0,) != own.rounds(new):
        return "with audit.every, round 0 would be attacked in training instead of with new weights"
    return None


def _free(change: Change, before: Table, after: Table) -> None:
    return None


_FEDERATION: Mapping[str, Rule] = {"federation.rounds": _rounds, "federation.keep_checkpoints": _free}
_AUDIT: Mapping[str, Rule] = {
    **_FEDERATION,
    "audit.trials": _victims,
    "audit.confidence": _victims,
    "audit.metrics": _metrics,
    "audit.adapted": _free,
}


def _settings(tables: Table) -> AuditSettings:
    return build(AuditSettings, _without(_table(tables, "audit"), "local"), HERE, "audit")


def _table(tables: Table, name: str) -> dict[str, Any]:
    found = tables.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _without(tables: Table, *names: str) -> dict[str, object]:
    return {name: value for name, value in tables.items() if name not in names}
