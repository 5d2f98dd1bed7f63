"""The federation that reads words (docs/results/thesis.md)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import load_config
from leaktight.core.protocols import Aggregator
from leaktight.core.types import Examples
from leaktight.data.words.collections import Iiit5k
from leaktight.data.words.images import decode_words
from leaktight.engines import inprocess
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.fedboosting import FedBoosting
from leaktight.fl.federation import Federation
from leaktight.fl.local import evaluate
from leaktight.fl.protocol import ServerState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

RECIPE = Path("recipe:fedboosting-figure-4-4")


@cache
def trained(aggregator: Aggregator) -> tuple[Federation, ServerState]:
    config = replace(load_config(RECIPE), aggregator=aggregator)
    federation = build_federation(config, *load_data(config))
    return federation, inprocess.run(federation, workers=1, score=False).server


@pytest.mark.parametrize("aggregator", [FedAvg(), FedBoosting(variant="code")], ids=["fedavg", "fedboosting"])
def test_it_reads_words_that_no_client_has_seen(aggregator: Aggregator) -> None:
    federation, server = trained(aggregator)
    dataset = federation.dataset
    assert not set(decode_words(dataset.test.targets)) & set(decode_words(dataset.train.targets))
    score = evaluate(federation.trainer, server.params, server.buffers, dataset.test)
    assert score.accuracy > 0.6, score


def test_it_reads_some_real_words(real_data: Path) -> None:
    """Few: the clients have 3800 small rendered words each. A network that has not learnt to read gets none right."""
    federation, server = trained(FedAvg())
    data = Iiit5k().load(real_data)
    words = Examples(
        torch.cat([data.train.inputs, data.test.inputs]), torch.cat([data.train.targets, data.test.targets])
    )
    lengths = (words.targets >= 0).sum(1)
    words = words.take(((lengths >= 3) & (lengths <= 5)).nonzero().flatten())
    assert evaluate(federation.trainer, server.params, server.buffers, words).accuracy > 0.1
