"""The intervals of the judge hold the true mean in 95 % of cases, on every kind of score that audits give."""

from __future__ import annotations

import math

import pytest
from bench.coverage import KINDS, VICTIMS, Kind, chosen, coverage

from leaktight.results.schema import CONFIDENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

REPETITIONS = 2000
CHANCE = 3 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / REPETITIONS)


@pytest.mark.parametrize("victims", VICTIMS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_intervals_hold_the_mean(kind: Kind, victims: int) -> None:
    assert coverage(chosen, kind, victims, REPETITIONS).share >= CONFIDENCE - CHANCE
