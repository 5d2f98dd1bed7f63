"""Every method by name: the name is the catalogue key, the `kind` in a config, and the id of its tests.

Names and descriptions are in `names.toml`. A method is imported when it is first looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar, cast

from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.config.names import ENTRIES
from leaktight.core.protocols import Aggregator, Attack, Defense
from leaktight.core.training import Schedule
from leaktight.crypto.cipher import Cipher
from leaktight.data.dataset import DatasetSource
from leaktight.data.partition import Scheme
from leaktight.fl.fedboosting import Fusion
from leaktight.models.gan import GeneratorSource
from leaktight.models.source import ModelSource, Network

T_co = TypeVar("T_co", covariant=True)


class Family(Mapping[str, type[T_co]], Generic[T_co]):
    """The methods of one kind by name. Names can be listed and tested for without importing any of them.

    base: what every method of the family is, those of users too.
    """

    def __init__(self, kind: str, base: type) -> None:
        self.kind, self.base, self.entries = kind, base, ENTRIES[kind]

    def __getitem__(self, name: str) -> type[T_co]:
        module, _, target = self.entries[name].target.partition(":")
        return cast("type[T_co]", getattr(import_module(module), target))

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def name_of(self, method: type) -> str | None:
        """The name of a class of this family; None where it is not of it."""
        target = f"{method.__module__}:{method.__qualname__}"
        return next((name for name, entry in self.entries.items() if entry.target == target), None)


DATASETS: Family[DatasetSource] = Family("datasets", DatasetSource)
PARTITIONS: Family[Scheme] = Family("partitions", Scheme)
MODELS: Family[Network] = Family("models", ModelSource)
GENERATORS: Family[GeneratorSource] = Family("generators", GeneratorSource)
SCHEDULES: Family[Schedule] = Family("schedules", Schedule)
AGGREGATORS: Family[Aggregator] = Family("aggregators", Aggregator)
CIPHERS: Family[Cipher] = Family("ciphers", Cipher)
FUSIONS: Family[Fusion] = Family("fusions", Fusion)
ATTACKS: Family[Attack] = Family("attacks", Attack)
LABELS: Family[LabelStrategy] = Family("labels", LabelStrategy)
DEFENSES: Family[Defense] = Family("defenses", Defense)

CATALOGUE: Mapping[str, Family[object]] = {
    family.kind: family
    for family in (
        DATASETS,
        PARTITIONS,
        MODELS,
        GENERATORS,
        SCHEDULES,
        AGGREGATORS,
        CIPHERS,
        FUSIONS,
        ATTACKS,
        LABELS,
        DEFENSES,
    )
}
"""All families by kind."""
