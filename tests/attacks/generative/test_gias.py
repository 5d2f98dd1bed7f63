from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.attacks.generative.test_ggl import scene
from tests.attacks.generators import CONDITIONAL, LINEAR
from tests.seeds import replayed

from leaktight.attacks.film import Recorder
from leaktight.attacks.generative.gias import Gias
from leaktight.attacks.generative.latent import GeneratorWeights
from leaktight.core.errors import UsageError
from leaktight.core.threat import Knowledge
from leaktight.core.types import Batch

QUICK = Gias(generator=LINEAR, iterations=3, latent_iterations=3, restarts=2, onednn=True)


def test_the_second_phase_finds_what_the_generator_cannot_make() -> None:
    """The image is off the generator's plane by a pattern; latents leave that, weights take it away."""
    from tests.attacks.generative.test_ggl import classifier
    from tests.attacks.scenes import observe

    _, made, _ = scene()
    pattern = 0.1 * (2 * torch.rand(made.inputs.shape, generator=replayed(4).public()) - 1)
    truth = Batch(made.inputs + pattern, made.targets)
    seen = replace(observe(classifier(), truth, 3), labels=truth.targets)
    attack = Gias(
        generator=LINEAR,
        latent_iterations=300,
        iterations=600,
        restarts=2,
        learning_rate=3e-3,
        total_variation=0.0,
        onednn=True,
    )
    first = attack.matching().reconstruct([seen], rng=replayed(0).child("latents"))
    found = attack.reconstruct([seen], rng=replayed(0))
    errors = [float((each.guess.inputs - truth.inputs).square().mean()) for each in (first, found)]
    assert found.notes["latent_loss"] == pytest.approx(first.loss, rel=1e-4)
    assert found.loss < 1e-2 * first.loss
    assert errors[1] < 0.2 * errors[0]


def test_every_image_has_a_generator_of_its_own() -> None:
    seen, truth, latents = scene(count=2, label=0)
    matching = QUICK.second(QUICK.matching(), latents)
    problem = matching.evidence([seen], rng=replayed(0))
    space = GeneratorWeights(generator=LINEAR, latents=latents).space(problem, replayed(0), torch.float32)
    variables = space.draw(replayed(0))
    assert set(variables) == {"0:matrix", "0:offset", "1:matrix", "1:offset"}
    assert torch.allclose(space.images(variables, space.constants), truth.inputs, atol=1e-6)
    moved = space.images({**variables, "1:offset": variables["1:offset"] + 0.1}, space.constants)
    assert torch.allclose(moved[0], truth.inputs[0], atol=1e-6)
    assert torch.allclose(moved[1], truth.inputs[1] + 0.1, atol=1e-6)
    with pytest.raises(UsageError, match="expected latents"):
        GeneratorWeights(generator=LINEAR, latents=latents[:1]).space(problem, replayed(0), torch.float32)


def test_a_conditional_generator_keeps_its_classes_in_both_phases() -> None:
    seen, truth, latents = scene(CONDITIONAL, count=2, label=0)
    attack = replace(QUICK, generator=CONDITIONAL)
    problem = attack.matching().evidence([seen], rng=replayed(0))
    space = GeneratorWeights(generator=CONDITIONAL, latents=latents).space(problem, replayed(0), torch.float32)
    assert torch.allclose(space.images(space.draw(replayed(0)), space.constants), truth.inputs, atol=1e-6)
    assert attack.reconstruct([seen], rng=replayed(0)).guess.inputs.shape == truth.inputs.shape


def test_the_same_seed_gives_the_same_bytes_and_both_phases_report() -> None:
    seen, _, _ = scene()
    film = Recorder()
    attack = replace(QUICK, progress_every=1)
    first = attack.reconstruct([seen], rng=replayed(5), progress=film)
    again, other = (QUICK.reconstruct([seen], rng=replayed(seed)) for seed in (5, 6))
    assert torch.equal(first.guess.inputs, again.guess.inputs)
    assert not torch.equal(first.guess.inputs, other.guess.inputs)
    assert [iteration for iteration, _ in film.losses] == [1, 2, 3, 4, 5, 6]
    assert Knowledge.LABELS in QUICK.requires
    assert QUICK.composition() is None


@pytest.mark.parametrize("name", ["learning_rate", "latent_learning_rate", "iterations", "latent_iterations"])
def test_both_phases_are_checked_at_once(name: str) -> None:
    change: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match="expected"):
        replace(QUICK, **change)
