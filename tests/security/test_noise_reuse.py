"""Noise that comes twice can be subtracted, so it never does: another request meets other noise, even unrefused.

A client refuses to train in the same round again. Here it has forgotten that it did, as after a restored backup.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.security.scan import Numbers
from tests.security.scenes import MANY_STEPS, NOISY, flat, make_client, noise_of, played, request, sent

from leaktight.core.errors import RefusedError
from leaktight.core.protocols import Defense
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.minmax import MinMaxSampling

UNRELATED = 0.4
"""Five standard deviations of the correlation of 163 unrelated numbers."""

OTHER: dict[str, dict[str, Any]] = {
    "model": {"moved": 1e-3},
    "model, by one bit": {"moved": 1e-7},
    "learning rate": {"learning_rate": 0.5},
    "loss scale": {"scale": 0.5},
}

every_noise = pytest.mark.parametrize("kind", NOISY)
every_change = pytest.mark.parametrize("change", OTHER)


@cache
def first_noise(kind: str) -> Numbers:
    return flat(noise_of(*NOISY[kind]))


def correlation(left: Any, right: Any) -> float:
    return abs(float(np.corrcoef(left, right)[0, 1]))


@every_noise
@every_change
def test_another_request_in_the_same_round_meets_other_noise(kind: str, change: str) -> None:
    defense, silent = NOISY[kind]
    assert correlation(first_noise(kind), flat(noise_of(defense, silent, **OTHER[change]))) < UNRELATED


@every_noise
def test_the_same_request_is_answered_by_the_same_bytes(kind: str) -> None:
    """The control: whoever asks for the same gets the same, and learns nothing from it."""
    again = flat(noise_of(*NOISY[kind]))
    assert np.array_equal(first_noise(kind), again)
    assert correlation(first_noise(kind), again) > 0.999


@every_change
def test_rates_and_kept_entries_are_drawn_anew(change: str) -> None:
    settings = OTHER[change]
    scale = settings.get("learning_rate", MANY_STEPS.learning_rate)
    rates = np.array(played(Lrp(), MANY_STEPS).truth().learning_rates) / MANY_STEPS.learning_rate
    again = np.array(played(Lrp(), MANY_STEPS, **settings).truth().learning_rates) / scale
    assert np.abs(rates - again).min() > 0
    assert correlation(rates, again) < 0.9
    kept, others = (flat(sent(played(MinMaxSampling(keep_share=0.5), **each))) != 0 for each in ({}, settings))
    assert not np.array_equal(kept, others)


def test_an_honest_client_refuses_the_second_request() -> None:
    client = make_client(Defense())
    state = client.train_round(request(client), None).state
    with pytest.raises(RefusedError, match="round"):
        client.train_round(request(client, moved=1e-3), state)
