from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.attacks.generators import CONDITIONAL, LINEAR, SIDE
from tests.attacks.scenes import observe
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.adaptive.table import adapt
from leaktight.attacks.film import Recorder
from leaktight.attacks.generative.ggl import AsSeen, Expected, Ggl
from leaktight.attacks.generative.latent import Latents, divergence
from leaktight.attacks.labels.rules import Given, Joint
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import Simulation
from leaktight.attacks.optimizers.bayesian import Bayesian
from leaktight.attacks.optimizers.derivative_free import CmaEs
from leaktight.config.catalogue import ATTACKS
from leaktight.config.settings import load_config
from leaktight.core.errors import LeaktightError, ModelError, UsageError
from leaktight.core.protocols import Defense
from leaktight.core.rng import global_seed
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.threat import Knowledge
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, Update
from leaktight.defenses.clipping import Clipping
from leaktight.defenses.compression import GradientCompression
from leaktight.defenses.soteria import Soteria
from leaktight.fl.local import Trainer, local_update, silent
from leaktight.models.gan import GeneratorSource, OwnGenerator

QUICK = Ggl(generator=LINEAR, iterations=4, population=8, onednn=True)


def classifier() -> nn.Module:
    with global_seed(replayed(3)):
        return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 3))


def scene(source: GeneratorSource = LINEAR, count: int = 1, label: int = 2) -> tuple[Observation, Batch, Tensor]:
    """The gradient of images that the generator can make, the images, and their latents."""
    generator = source.read()
    latents = torch.rand(count, generator.latent, generator=replayed(1).public()) - 0.5
    labels = torch.arange(label, label + count) % 3
    images = generator.sample(latents, None if generator.num_classes is None else labels)
    seen = observe(classifier(), Batch(images, labels), 3)
    return replace(seen, labels=labels.sort().values), Batch(images, labels), latents


@pytest.mark.parametrize(
    "attack",
    [
        Ggl(generator=LINEAR, iterations=60, population=12, onednn=True),
        Ggl(generator=LINEAR, optimizer="adam", iterations=300, kl=0.0, onednn=True),
        Ggl(generator=LINEAR, optimizer="adam", iterations=300, regulariser="tanh", onednn=True),
    ],
    ids=["cma_es", "adam", "adam-tanh"],
)
def test_a_latent_that_can_be_told_is_found(attack: Ggl) -> None:
    seen, truth, latents = scene()
    matching = attack.matching()
    found = matching.search(matching.evidence([seen], rng=replayed(0)), rng=replayed(0))
    assert isinstance(matching.sought, Latents)
    moved = found.search.best.variables["latents"]
    reached = moved.tanh() if matching.sought.squash else moved
    assert torch.allclose(reached, latents, atol=2e-2)
    assert torch.allclose(found.guess.inputs, truth.inputs, atol=2e-3)
    assert found.guess.targets.tolist() == truth.targets.tolist()


def test_a_gaussian_process_comes_nearer_than_chance() -> None:
    """With ten questions after the first points, it is nearer than the best of those and as many random ones."""
    seen, truth, _ = scene()
    matching = replace(
        Ggl(generator=LINEAR, optimizer="bayesian", kl=0.0, iterations=11, onednn=True).matching(),
        optimizer=Bayesian(first=16, batch=4, memory=64, proposals=200),
    )
    found = matching.reconstruct([seen], rng=replayed(0))
    assert found.notes["evaluations"] == 16 + 10 * 4
    generator = LINEAR.read()
    random = generator.sample(4 * torch.rand(56, 3, generator=replayed(8).public()) - 2)
    chance = float((random - truth.inputs).square().mean((1, 2, 3)).min())
    assert float((found.guess.inputs - truth.inputs).square().mean()) < 0.5 * chance


def test_a_batch_is_found_with_its_labels_known() -> None:
    seen, truth, _ = scene(count=2, label=0)
    attack = Ggl(generator=LINEAR, optimizer="adam", iterations=400, kl=0.0, labels=Given(), onednn=True)
    found = attack.reconstruct([seen], rng=replayed(0))
    assert torch.allclose(found.guess.inputs, truth.inputs, atol=5e-3)
    with pytest.raises(UsageError, match="expected 1 example for idlg"):
        QUICK.reconstruct([seen], rng=replayed(0))


def test_a_conditional_generator_is_asked_for_the_label() -> None:
    seen, truth, _ = scene(CONDITIONAL, label=1)
    found = Ggl(generator=CONDITIONAL, iterations=60, population=12, onednn=True).reconstruct([seen], rng=replayed(0))
    assert torch.allclose(found.guess.inputs, truth.inputs, atol=2e-3)
    joint = Matching(sought=Latents(generator=CONDITIONAL), labels=Joint(), iterations=1)
    with pytest.raises(UsageError, match="known labels for a class-conditional"):
        joint.reconstruct([seen], rng=replayed(0))


@pytest.mark.parametrize("optimizer", ["cma_es", "adam", "bayesian"])
def test_the_same_seed_gives_the_same_bytes(optimizer: Any) -> None:
    seen, _, _ = scene()
    attack = replace(QUICK, optimizer=optimizer, iterations=2)
    states = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002
    first, again, other = (attack.reconstruct([seen], rng=replayed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first.guess.inputs, again.guess.inputs)
    assert not torch.equal(first.guess.inputs, other.guess.inputs)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tobytes() == states[1]  # type: ignore[index]  # noqa: NPY002


def test_points_are_evaluated_in_groups_whatever_the_population() -> None:
    """Losses of points are evaluated in groups of eight, the last one filled up."""
    found = replace(QUICK, population=11, iterations=5).reconstruct([scene()[0]], rng=replayed(0))
    assert found.notes["evaluations"] == 55


def test_progress_and_restarts() -> None:
    seen, _, _ = scene()
    film = Recorder()
    found = replace(QUICK, restarts=2, progress_every=2).reconstruct([seen], rng=replayed(0), progress=film)
    assert [iteration for iteration, _ in film.losses] == [2, 4, 2, 4]
    assert film.guesses[-1].shape == (1, 1, SIDE, SIDE)
    assert found.loss == min(found.notes["losses"])
    assert len(found.notes["losses"]) == 2


def defended(defense: Defense, seen: Observation, batch: Batch) -> Update:
    """What the client sends behind the defense."""
    params, buffers = cloned(parameters_of(seen.model)), cloned(buffers_of(seen.model))
    trainer = Trainer(seen.model, LocalTraining(batch_size=len(batch)), defense=defense)
    result = local_update(trainer, params, buffers, [batch], learning_rates=[0.1], rng=replayed(0))
    update = Update(result.update(params, "gradient"), "gradient", len(batch))
    return defense.on_update(update, result.state, rng=replayed(0), report=silent)[0]


@pytest.mark.parametrize(
    ("expected", "defense"),
    [
        ("clipping", Clipping(clip_norm=0.3)),
        ("compression", GradientCompression(prune_share=0.7)),
        ("compression", GradientCompression(prune_share=0.4, scope="global")),
        ("soteria", Soteria(prune_share=0.5)),
    ],
)
def test_the_transform_of_the_true_gradient_is_what_the_defense_sent(expected: Expected, defense: Defense) -> None:
    seen, truth, _ = scene()
    sent = defended(defense, seen, truth)
    plain = seen.update.tensors
    assert any(not torch.allclose(sent.tensors[name], plain[name]) for name in plain)
    shown = replace(seen, update=sent, defense=defense)
    view = AsSeen(inner=Simulation(), defense=expected).view(shown, 1, torch.float32, needs_scale=True)
    guess = view.weighted(view.guess(truth.inputs, truth.targets, view.params, view.buffers), view.weights)
    for name, tensor in view.weighted(view.target, view.weights).items():
        assert torch.allclose(guess[name], tensor, atol=1e-6), name
    ggl = replace(QUICK, expects=expected)
    assert Knowledge.DEFENSE in ggl.requires
    assert Knowledge.DEFENSE not in QUICK.requires
    assert ggl.reconstruct([shown], rng=replayed(0)).notes["assumed"]


def test_with_the_transform_a_compressed_update_gives_the_image_away() -> None:
    seen, truth, _ = scene()
    shown = replace(seen, update=defended(GradientCompression(prune_share=0.8), seen, truth))
    attack = Ggl(generator=LINEAR, iterations=60, population=12, onednn=True)
    blind, knowing = (
        replace(attack, expects=kind).reconstruct([shown], rng=replayed(0)) for kind in ("none", "compression")
    )
    errors = [float((found.guess.inputs - truth.inputs).square().mean()) for found in (blind, knowing)]
    assert errors[1] < 0.1 * errors[0]


def test_the_attacker_who_knows_a_defense_searches_latents_too() -> None:
    seen, truth, _ = scene()
    defense = GradientCompression(prune_share=0.8)
    attack = adapt(Ggl(generator=LINEAR, iterations=60, population=12, onednn=True), defense)
    assert attack is not None
    found = attack.reconstruct([replace(seen, update=defended(defense, seen, truth), defense=defense)], rng=replayed(0))
    assert torch.allclose(found.guess.inputs, truth.inputs, atol=5e-3)


def test_the_divergence_is_zero_for_standard_normal_entries_alone() -> None:
    even = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    assert float(divergence(even)) == pytest.approx(0, abs=1e-6)
    assert float(divergence(2 * even)) == pytest.approx(0.5 * (4 - 1 - np.log(4)), abs=1e-5)
    assert float(divergence(torch.cat([even, even + 1]))) == pytest.approx(0.25, abs=1e-5)


def test_settings_survive_a_config() -> None:
    text = 'attack.generator={kind="own_generator", target="tests.attacks.generators:linear", latent=3, output="unit"}'
    config = load_config(None, [text, "attack.iterations=7"], attacks=["ggl"])
    assert config.attacks == (Ggl(generator=LINEAR, iterations=7),)
    assert 'kind = "own_generator"' in config.to_toml()
    assert ATTACKS["ggl"] is Ggl
    with pytest.raises(LeaktightError, match="needs generator"):
        load_config(None, [], attacks=["ggl"])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: replace(QUICK, optimizer="newton"), "optimizer"),  # type: ignore[arg-type]
        (lambda: replace(QUICK, regulariser="l1"), "regulariser"),  # type: ignore[arg-type]
        (lambda: replace(QUICK, expects="noise"), "defense"),  # type: ignore[arg-type]
        (lambda: replace(QUICK, kl=-1.0, regulariser="kl"), "kl"),
        (lambda: replace(QUICK, parallel="vmap"), "with CmaEs"),
        (lambda: CmaEs(population=2), "population"),
        (lambda: CmaEs(spread=0.0), "spread"),
        (lambda: Bayesian(box=0.0), "box"),
        (lambda: Bayesian(batch=1), "batch"),
        (lambda: Latents(generator=LINEAR, start="zero"), "start"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_without_the_extra_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cma", None)
    with pytest.raises(LeaktightError, match=r"leaktight\[generative\]"):
        QUICK.reconstruct([scene()[0]], rng=replayed(0))


def test_a_generator_of_other_images_is_refused() -> None:
    wide = observe(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), Batch(torch.rand(1, 1, 8, 8), torch.tensor([1])), 3)
    with pytest.raises(ModelError, match="expected a generator of images of 1x8x8, got one of 1x4x4"):
        QUICK.reconstruct([wide], rng=replayed(0))
    few = OwnGenerator(target=LINEAR.target, latent=3, output="unit", num_classes=2)
    with pytest.raises(ModelError, match="all 3 classes, got one of 2"):
        replace(QUICK, generator=few).reconstruct([scene()[0]], rng=replayed(0))


def test_a_larger_generator_is_scaled_by_areas() -> None:
    small = observe(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), Batch(torch.rand(1, 1, 2, 2), torch.tensor([1])), 3)
    assert QUICK.reconstruct([small], rng=replayed(0)).guess.inputs.shape == (1, 1, 2, 2)
