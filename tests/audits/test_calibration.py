"""The judge is wrong as seldom as it claims; docs/results/calibration.md has the figures of many more audits."""

from __future__ import annotations

import pytest
from bench import made_up
from bench.audits import Scene, verdicts
from bench.calibration import BLIND, BLIND_LABELS, DESTROYED, SAYS_MORE, UNTOUCHED, worst_blind
from bench.guessers import NoisyInversion
from scipy import stats

MADE_UP = 200


def test_ranks_and_labels_by_chance_rarely_say_more_at_either_look() -> None:
    wrong = sum(any(made_up.audit(number)) for number in range(MADE_UP))
    assert wrong <= stats.binom.ppf(0.999, MADE_UP, 0.05)


@pytest.mark.parametrize(
    "scene",
    [
        Scene("labels known", BLIND, trials=3),
        Scene("labels unknown", BLIND_LABELS, (), "shards", batch=4, labels=False, trials=3),
    ],
    ids=lambda scene: scene.name,
)
def test_guesses_without_the_update_find_nothing(scene: Scene) -> None:
    assert worst_blind(verdicts(scene, 1)) not in SAYS_MORE


def test_an_exact_attack_decides_what_a_defense_is_worth() -> None:
    scene = Scene("exact", (NoisyInversion(noise=0.0),), (UNTOUCHED, DESTROYED), controls=())
    found = {verdict.defense: verdict.verdict for verdict in verdicts(scene, 2)}
    assert list(found.values()) == ["reconstructed", "reconstructed", "nothing-found"], found
