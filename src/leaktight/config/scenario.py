"""Builds a federation from a configuration."""

from __future__ import annotations

import secrets
from dataclasses import replace

from leaktight.config.settings import Config
from leaktight.core.devices import chosen_device
from leaktight.core.errors import DataError
from leaktight.core.keys import KEY_BYTES
from leaktight.core.rng import Rng
from leaktight.data.dataset import Dataset, data_root
from leaktight.data.partition import Partition, Pooled
from leaktight.fl.federation import Federation, assemble
from leaktight.models.initialise import build_model
from leaktight.models.source import check_fits


def load_data(config: Config) -> tuple[Dataset, Partition]:
    """The data set and its partition among clients."""
    dataset = config.data.load(data_root(config.data_root))
    if dataset.task.one_class and len(dataset.train.targets.unique()) < 2:
        raise DataError(
            f"{dataset.name}: expected training examples of 2 or more classes, got one class; a classifier learns "
            "nothing from it"
        )
    return dataset, config.partition.split(dataset, rng=Rng(config.seed).child("partition"))


def build_federation(config: Config, dataset: Dataset, partition: Partition) -> Federation:
    """Clients, server and model of the configuration, after a check that they fit together."""
    rng = Rng(config.seed, key=config.key or secrets.token_bytes(KEY_BYTES))
    model = build_model(
        config.model.source, dataset.inputs, dataset.num_classes, init=config.model.init, rng=rng.child("model")
    )
    check_fits(model, dataset.inputs, dataset.num_classes, dataset.task, mode=config.model.mode)
    return assemble(
        dataset,
        partition,
        model,
        local=config.local,
        aggregator=config.aggregator,
        plan=config.plan,
        defense=config.defense,
        mode=config.model.mode,
        guard=config.guard,
        consent=config.consent,
        device=chosen_device(config.device),
        rng=rng.child("federation"),
    )


def centralised(config: Config) -> Config:
    """The configuration with one client that holds all data: the reference of the papers' accuracy tables."""
    plan = replace(config.plan, per_round=None, min_clients=None)
    return replace(config, partition=Pooled(validation=config.partition.validation), plan=plan)
