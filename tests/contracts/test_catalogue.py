"""Every public method is in the catalogue, and every entry keeps the conventions."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys
import typing
from typing import Any

import pytest

import leaktight
from leaktight.adaptive.auto import KnowingAuto
from leaktight.adaptive.knowing import Knowing
from leaktight.adaptive.stages import EarlierLabels
from leaktight.api.leaderboard import Handed
from leaktight.attacks.controls import KnownOrBlind
from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.matching.attack import Matching
from leaktight.config.catalogue import (
    AGGREGATORS,
    ATTACKS,
    CATALOGUE,
    CIPHERS,
    DATASETS,
    DEFENSES,
    FUSIONS,
    GENERATORS,
    LABELS,
    MODELS,
    PARTITIONS,
    SCHEDULES,
)
from leaktight.config.names import ENTRIES
from leaktight.core.protocols import Aggregator, Attack, Defense
from leaktight.core.threat_presets import PRESETS
from leaktight.core.training import Schedule
from leaktight.crypto.cipher import Cipher
from leaktight.data.dataset import DatasetSource
from leaktight.data.given import GivenDataset, GivenImages
from leaktight.data.partition import Scheme
from leaktight.fl.fedboosting import Fusion
from leaktight.metrics import METRICS
from leaktight.models.gan import GeneratorSource
from leaktight.models.source import Network

FAMILIES: dict[str, tuple[type, typing.Mapping[str, Any]]] = {
    "aggregators": (Aggregator, AGGREGATORS),
    "ciphers": (Cipher, CIPHERS),
    "fusions": (Fusion, FUSIONS),
    "attacks": (Attack, ATTACKS),
    "labels": (LabelStrategy, LABELS),
    "datasets": (DatasetSource, DATASETS),
    "defenses": (Defense, DEFENSES),
    "models": (Network, MODELS),
    "generators": (GeneratorSource, GENERATORS),
    "partitions": (Scheme, PARTITIONS),
    "schedules": (Schedule, SCHEDULES),
}
SETTINGS = [
    pytest.param(cls, id=f"{family}-{name}")
    for family, (_, entries) in FAMILIES.items()
    for name, cls in entries.items()
]


def public_classes() -> list[type]:
    found = []
    for module in pkgutil.walk_packages(leaktight.__path__, "leaktight."):
        if module.name.endswith("__main__"):
            continue
        for name, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if cls.__module__ == module.name and not name.startswith("_"):
                found.append(cls)
    return found


def belongs(cls: type, base: type) -> bool:
    if getattr(base, "_is_protocol", False):
        members = {name for name, value in vars(base).items() if callable(value) and not name.startswith("_")}
        return dataclasses.is_dataclass(cls) and all(callable(getattr(cls, name, None)) for name in members)
    return issubclass(cls, base)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_public_method_has_its_line(family: str) -> None:
    base, entries = FAMILIES[family]
    bases = {parent for entry in entries.values() for parent in entry.__mro__[1:]}
    concrete = {
        cls
        for cls in public_classes()
        if belongs(cls, base) and not inspect.isabstract(cls) and (cls not in bases or cls in entries.values())
    } - {
        Matching,  # the loop itself, of which the attacks are compositions
        Knowing,  # what changes an attack for a defense
        KnowingAuto,
        Handed,  # guesses that were made elsewhere
        EarlierLabels,  # those of the last guess
        KnownOrBlind,  # the labels of controls
        GivenImages,  # data of a Python caller, which no config can name
        GivenDataset,
    }
    assert concrete - set(entries.values()) == set(), f"missing in catalogue.{family.upper()}"
    assert len(set(entries.values())) == len(entries), "one class, one name"


@pytest.mark.parametrize("cls", SETTINGS)
def test_settings_are_frozen_and_by_keyword(cls: type) -> None:
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(field.kw_only for field in dataclasses.fields(cls))


def describe(entry: Any) -> str:
    """An entry's own description, or the start of its docstring."""
    text = getattr(entry, "description", None) or entry.__doc__ or ""
    return " ".join(str(text).split("\n\n")[0].split())


@pytest.mark.parametrize("kind", CATALOGUE)
def test_every_entry_says_in_one_line_what_it_is(kind: str) -> None:
    """Names and descriptions are static, so that they can be listed without an import; here they meet the methods."""
    for name, entry in CATALOGUE[kind].items():
        line = ENTRIES[kind][name].description
        assert line == describe(entry), (kind, name)
        assert 10 < len(line) < 160, (kind, name, line)
        assert name == name.lower(), (kind, name)


def test_metrics_are_listed_as_they_are() -> None:
    assert {name: entry.description for name, entry in ENTRIES["metrics"].items()} == {
        name: metric.description for name, metric in METRICS.items()
    }


def test_threat_models_are_listed_as_they_are() -> None:
    assert {name: entry.description for name, entry in ENTRIES["threats"].items()} == {
        name: preset.sentence for name, preset in PRESETS.items()
    }


def test_listing_imports_no_method() -> None:
    code = "import sys; from leaktight.cli.app import main; sys.argv = ['leaktight', 'list', 'attacks']; main()"
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); "
    done = subprocess.run([sys.executable, "-c", check + code], capture_output=True, text=True, check=False)
    assert "inverting_gradients" in done.stdout
    assert done.stderr.strip() == "False"


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_validate_on_construction(family: str) -> None:
    for cls in FAMILIES[family][1].values():
        needed = [
            field
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        if not needed:
            assert cls() == cls()
            hash(cls())
