"""SPEAR and Cocktail Party on real updates of the embedded digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed

from leaktight.attacks.exact.cocktail_party import CocktailParty
from leaktight.attacks.exact.linear_inversion import LinearInversion
from leaktight.attacks.exact.spear import Spear
from leaktight.core.errors import ModelError
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation
from leaktight.data.embedded import Digits
from leaktight.metrics.match import match
from leaktight.models.initialise import build_model
from leaktight.models.small import Mlp


def scene(count: int, *, local: LocalTraining | None = None, **settings: Any) -> tuple[Batch, Observation]:
    data = Digits().load(Path())
    model = build_model(Mlp(**settings), data.inputs, data.num_classes, rng=replayed(1))
    batch = draw(data, count, seed=5)
    return batch, observe(model, batch, data.num_classes, local=local)


@pytest.mark.parametrize("local", [None, LocalTraining(batch_size=6, learning_rate=0.5)], ids=["gradient", "delta"])
@pytest.mark.parametrize("normal", [{}, {"mean": (0.4,), "std": (0.3,)}], ids=["plain", "normalised"])
def test_a_batch_is_exact_and_proven(local: LocalTraining | None, normal: dict[str, object]) -> None:
    batch, seen = scene(6, local=local, **normal)
    found = Spear().reconstruct([seen], rng=replayed(0))
    order = match(found.guess.inputs, batch.inputs)
    assert (found.guess.inputs[order] - batch.inputs).abs().max() < 1e-3
    assert found.guess.targets[order].tolist() == batch.targets.tolist()
    assert found.certificate is not None
    assert found.certificate.holds


def test_a_layer_that_is_too_narrow_proves_nothing() -> None:
    _, seen = scene(6, hidden=(14, 14))
    found = Spear(rounds=1).reconstruct([seen], rng=replayed(0))
    assert found.certificate is not None
    assert not found.certificate.holds


def test_one_input_that_explains_all_units_is_a_proof() -> None:
    _, seen = scene(1)
    own = LinearInversion().reconstruct([seen], rng=replayed(0)).certificate
    assert own is not None
    assert own.holds


def test_other_activations_are_unmixed_in_part() -> None:
    batch, seen = scene(4, activation="sigmoid")
    with pytest.raises(ModelError, match="a ReLU behind it"):
        Spear().reconstruct([seen], rng=replayed(0))
    found = CocktailParty(iterations=200).reconstruct([seen], rng=replayed(0))
    order = match(found.guess.inputs, batch.inputs)
    error = (found.guess.inputs[order] - batch.inputs).square().mean()
    mean = (batch.inputs.mean(0, keepdim=True) - batch.inputs).square().mean()
    assert error < mean
    assert found.certificate is None
