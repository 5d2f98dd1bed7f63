"""Every method by name: the name is the catalogue key, the `kind` in a config, and the id of its tests.

Names and descriptions are in `names.py`. A method is imported when it is first looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar, cast

from leaktight.config.names import ENTRIES
from leaktight.core.protocols import Aggregator, Attack, Defense
from leaktight.core.training import Schedule
from leaktight.data.dataset import DatasetSource
from leaktight.data.partition import Scheme

T = TypeVar("T")


class Family(Mapping[str, T]):
    """The methods of one kind by name. Names can be listed and tested for without importing any of them."""

    def __init__(self, kind: str) -> None:
        self.entries = ENTRIES[kind]

    def __getitem__(self, name: str) -> T:
        module, _, target = self.entries[name].target.partition(":")
        found = getattr(import_module(module), target)
        return cast(T, found[name] if isinstance(found, Mapping) else found)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def name_of(self, method: type) -> str | None:
        """The name of a class of this family; None where it is not of it."""
        target = f"{method.__module__}:{method.__qualname__}"
        return next((name for name, entry in self.entries.items() if entry.target == target), None)


CATALOGUE: Mapping[str, Family[Any]] = {kind: Family(kind) for kind in ENTRIES}
"""All families by kind."""

DATASETS: Mapping[str, type[DatasetSource]] = CATALOGUE["datasets"]
PARTITIONS: Mapping[str, type[Scheme]] = CATALOGUE["partitions"]
SCHEDULES: Mapping[str, type[Schedule]] = CATALOGUE["schedules"]
AGGREGATORS: Mapping[str, type[Aggregator]] = CATALOGUE["aggregators"]
CIPHERS: Mapping[str, type[Any]] = CATALOGUE["ciphers"]
FUSIONS: Mapping[str, type[Any]] = CATALOGUE["fusions"]
ATTACKS: Mapping[str, type[Attack]] = CATALOGUE["attacks"]
LABELS: Mapping[str, type[Any]] = CATALOGUE["labels"]
DEFENSES: Mapping[str, type[Defense]] = CATALOGUE["defenses"]
