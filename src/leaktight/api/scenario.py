"""The scenario of a call: a TOML file, a `Config`, or keywords with the caller's own objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from leaktight.config.catalogue import ATTACKS, DEFENSES
from leaktight.config.settings import Config, load_config
from leaktight.config.tables import Table, as_list
from leaktight.config.toml import choose_all
from leaktight.core.devices import chosen_device
from leaktight.core.errors import UsageError, suggestion
from leaktight.core.protocols import Attack, Defense
from leaktight.core.threat import ThreatModel
from leaktight.core.training import LocalTraining
from leaktight.data.dataset import Dataset, DatasetSource
from leaktight.data.given import GivenDataset, GivenImages
from leaktight.data.partition import Scheme
from leaktight.models.source import ModelSource

Source: TypeAlias = Config | Path | str | None
"""A config object, a TOML file, "recipe:NAME", or None for the built-in scenario."""

Method: TypeAlias = "str | Table"
"""A kind of the catalogue, "package.module:Class", or a table with a kind and settings."""


Array: TypeAlias = Tensor | np.ndarray
"""Images or labels in memory."""


class Scenario(TypedDict, total=False):
    """A federation as keywords; defaults come from the built-in scenario.

    model: a network, or a kind ("resnet20", "package.module:function").
    data: images (N, C, H, W) in [0, 1] and labels (N,) as a pair of tensors or arrays, a `Dataset`, or a kind
    ("cifar10").
    partition, local, federation, threat: tables of a config, or their settings objects. A threat model may be a name
    (`leaktight list threats`).
    defenses: objects or kinds; an audit tries each, training stacks them. attacks: objects or kinds.
    seed: of all randomness that is not secret. settings: overrides, "table.key=value". data_root: folder of data sets.
    device: where models, attacks and metrics run, "cpu" (default), "auto", "cuda", "cuda:1" or "mps".
    """

    model: nn.Module | ModelSource | Method
    data: tuple[Array, Array] | Dataset | DatasetSource | Method
    partition: Scheme | Method
    local: LocalTraining | Table
    federation: Table
    threat: ThreatModel | Table | str
    defenses: Sequence[Defense | Method] | Defense | str
    attacks: Sequence[Attack | Method] | Attack | str
    seed: int
    settings: Sequence[str]
    data_root: Path | str | None
    device: str


TABLES = ("model", "data", "partition", "local", "federation", "threat", "seed")
"""The keywords that are tables of a config."""


def configure(source: Source, options: Mapping[str, object], *, scenario: str = "") -> Config:
    """The configuration of a call.

    options: the keywords of `Scenario`. scenario: TOML on top of the built-in scenario if `source` is None.
    """
    require_keywords(options, Scenario)
    given = {name: _table(name, options[name]) for name in TABLES if name in options}
    defenses, attacks, settings = (as_list(options.get(name, [])) for name in ("defenses", "attacks", "settings"))
    if isinstance(source, Config):
        if given or settings:
            raise UsageError(f"expected {', '.join([*given, *map(str, settings)])} inside the Config; change it there")
        config = source
        if defenses:
            config = replace(config, defenses=choose_all(DEFENSES, defenses, "defenses", "defense"))
        if attacks:
            config = replace(config, attacks=choose_all(ATTACKS, attacks, "attacks", "attack"))
    else:
        path = None if source is None else Path(source)
        texts = [str(each) for each in settings]
        config = load_config(path, texts, given=given, defenses=defenses, attacks=attacks, scenario=scenario)
    changes: dict[str, Any] = {"device": str(chosen_device(str(options.get("device", config.device))))}
    if (root := options.get("data_root")) is not None:
        changes["data_root"] = Path(str(root))
    production = config.production and replace(config.production, **changes)
    return replace(config, **changes, production=production)


def require_keywords(given: Iterable[str], known: type) -> None:
    """Raise UsageError unless all keywords of a call are fields of the TypedDict `known`."""
    for name in given:
        if name not in known.__annotations__:
            raise UsageError(f"unknown keyword {name!r}; {suggestion(name, known.__annotations__)}")


def _data(value: object) -> object:
    """A data set of the catalogue's kind, of tensors or arrays in memory, or as it is."""
    if isinstance(value, Dataset):
        return GivenDataset(value)
    if isinstance(value, str | Mapping | DatasetSource):
        return value
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(each, Array) for each in value):
        images, labels = (torch.as_tensor(each) for each in value)
        return GivenImages(images=images, labels=labels)
    raise UsageError(
        "expected data as a pair (images, labels) of tensors or arrays, a Dataset, a kind or a table, got "
        f"{_type(value)}; stack the examples of a loader or list into two tensors"
    )


def _type(value: object) -> str:
    kinds = ", ".join(type(each).__name__ for each in value[:3]) if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}" + (f" of {len(value)} ({kinds})" if isinstance(value, tuple | list) else "")


def _table(name: str, value: object) -> object:
    """The value of a table as a table or object: a string becomes a kind or preset, tensors in memory a data set."""
    if name == "data":
        value = _data(value)
    if name == "model" and not isinstance(value, str | Mapping | nn.Module | ModelSource):
        raise UsageError(f"expected model as a torch.nn.Module, a kind or a table, got {_type(value)}")
    return {"preset" if name == "threat" else "kind": value} if isinstance(value, str) else value
