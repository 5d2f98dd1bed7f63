"""Rows and columns choose trials: by name, by settings, adaptive or not, valid or all that are finished."""

from __future__ import annotations

import pytest

from leaktight.core.errors import ConfigError
from leaktight.reproductions.measure import from_audit
from leaktight.results.schema import SCHEMA_VERSION, Threat, Trial


def trial(victim: int, attack: str, psnr: float, loss: float = 0.1, **settings: object) -> Trial:
    return Trial(
        schema_version=SCHEMA_VERSION,
        id=f"{attack}.{victim}",
        attack=attack,
        attack_settings=settings,  # type: ignore[arg-type]
        role="attack",
        defense="none",
        adaptive=False,
        trial=victim,
        round=0,
        client="client-000",
        seed=0,
        threat=Threat(server="curious", sees="client", knows=()),
        scores={"psnr": (psnr,)},
        loss=loss,
        first_loss=1.0,
        seconds=2.0,
    )


TRIALS = [
    trial(0, "agic(beta=1.0)", 10.0, beta=1.0),
    trial(1, "agic(beta=1.0)", 12.0, beta=1.0, loss=1.0),
    trial(0, "agic(beta=50.0)", 20.0, beta=50.0),
    trial(0, "dlg", 5.0),
]


def test_methods_of_one_kind_are_told_apart_by_their_settings() -> None:
    assert from_audit(TRIALS, {"attack": {"kind": "agic", "beta": 1.0}}) == {"victim 0": 10.0}
    assert from_audit(TRIALS, {"attack": {"kind": "agic", "beta": 50}}) == {"victim 0": 20.0}
    assert from_audit(TRIALS, {"attack": "dlg"}) == {"victim 0": 5.0}
    assert from_audit(TRIALS, {"attack": {"kind": "dlg", "beta": 1.0}}) == {}


def test_a_search_whose_loss_did_not_fall_counts_only_if_asked_for() -> None:
    choice = {"attack": {"kind": "agic", "beta": 1.0}, "finished": True}
    assert from_audit(TRIALS, choice) == {"victim 0": 10.0, "victim 1": 12.0}
    assert from_audit(TRIALS, {**choice, "metric": "seconds"}) == {"victim 0": 2.0, "victim 1": 2.0}


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="chooses 'atack'"):
        from_audit(TRIALS, {"atack": "dlg"})
